"""Small figures taken from the operands of a few telling operations while a trace is recorded (CPU tensors, a few times)."""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.readout import on_cpu, scalar

LIMIT = 1 << 20


def mask_figures(mask: Any, additive: bool) -> dict[str, Any]:
    """What an attention mask hides.

    Args:
        mask: boolean tensor [..., queries, keys] or [batch, keys], or a float one that is added to the scores.
        additive: a float mask: minus infinity (or below -1e4) hides.

    Returns:
        ``hidden_share``, ``full_rows`` (rows with nothing left to attend to), and for square masks ``hides_future`` and
        ``hides_past`` (shares of the upper and lower triangle that are hidden).
    """
    if not isinstance(mask, torch.Tensor) or not on_cpu(mask) or mask.numel() == 0 or mask.numel() > LIMIT:
        return {}
    hidden = (mask < -1e4) if additive else mask.bool()
    found: dict[str, Any] = {"hidden_share": scalar(hidden.float().mean()), "full_rows": int(scalar(hidden.all(-1).sum())), "shape": list(mask.shape)}
    if mask.dim() >= 2 and mask.shape[-1] == mask.shape[-2] and mask.shape[-1] > 1:
        square = hidden.reshape(-1, *mask.shape[-2:]).float().mean(0)
        n = square.shape[0]
        upper, lower = torch.ones(n, n).triu(1), torch.ones(n, n).tril(-1)
        found["hides_future"] = scalar((square * upper).sum() / upper.sum())
        found["hides_past"] = scalar((square * lower).sum() / lower.sum())
    return found


def figures(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Figures for this operation, ``{}`` for most."""
    def argument(position: int, key: str) -> Any:
        return kwargs.get(key, args[position] if len(args) > position else None)

    if name in ("masked_fill", "masked_fill_"):
        value = argument(2, "value")
        low = value if isinstance(value, int | float) else scalar(value) if isinstance(value, torch.Tensor) else 0.0
        if low < -1e3:
            return {**mask_figures(argument(1, "mask"), additive=False), "fill": str(low)}
    elif name == "scaled_dot_product_attention":
        mask = argument(3, "attn_mask")
        if isinstance(mask, torch.Tensor):
            boolean = mask.dtype == torch.bool
            found = mask_figures(~mask if boolean else mask, additive=not boolean)
            return {**found, "mask": "boolean" if boolean else "float", "is_causal": bool(kwargs.get("is_causal", False))}
        return {"mask": "none", "is_causal": bool(argument(5, "is_causal") or False)}
    elif name == "multi_head_attention_forward":
        found = {}
        for key in ("key_padding_mask", "attn_mask"):
            mask = kwargs.get(key)
            if isinstance(mask, torch.Tensor):
                found[key] = mask_figures(mask, additive=mask.dtype != torch.bool)
        return found
    return {}
