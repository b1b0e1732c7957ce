"""Small figures taken from the operands of a few telling operations while a trace is recorded (CPU tensors, a few times)."""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.readout import numbers, on_cpu, scalar

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
    elif mask.dim() >= 2 and mask.shape[0] * mask.shape[-1] == mask.numel() and mask.shape[0] > 1 and mask.shape[-1] > 2:
        rows = hidden.reshape(mask.shape[0], mask.shape[-1])
        found["hides_head"] = scalar((rows[:, 0] & ~rows[:, -1]).float().mean())
        found["hides_tail"] = scalar((rows[:, -1] & ~rows[:, 0]).float().mean())
    return found


def padded(ids: Any) -> dict[str, Any]:
    """At which end a batch of token ids [batch, time] is filled up: the share of rows that begin (``head``) or end (``tail``) with the
    commonest such id twice."""
    if not isinstance(ids, torch.Tensor) or not on_cpu(ids) or ids.dim() != 2 or ids.shape[0] < 4 or ids.shape[1] < 4 or ids.numel() > SIZE or ids.is_floating_point():
        return {}
    ends = {}
    for key, one, two in (("head", ids[:, 0], ids[:, 1]), ("tail", ids[:, -1], ids[:, -2])):
        ends[f"padded_{key}"] = scalar(((one == two) & (one == torch.mode(one).values)).float().mean())
    return ends


SIZE = 1 << 16
"""Elements of one operand that are looked at."""
WEIGHTED = frozenset(("linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "addmm", "bmm", "einsum", "cat", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
                      "rnn_tanh_cell", "rnn_relu_cell"))
LIKELIHOODS = ("LogBackward0", "LogSoftmaxBackward0", "LogSigmoidBackward0", "Log1PBackward0")


def spread(tensor: torch.Tensor) -> dict[str, Any] | None:
    """Mean, deviation and range of a floating tensor, ``None`` where there is nothing to read."""
    if not on_cpu(tensor) or not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_sparse:
        return None
    values = tensor.detach()
    if values.numel() > SIZE:
        values = values.flatten()[:: values.numel() // SIZE] if values.dim() < 2 else values[:: max(1, values.numel() // SIZE)]
    values = values.float()
    std, mean = torch.std_mean(values, unbiased=False)
    low, high = torch.aminmax(values)
    return {"mean": scalar(mean), "std": scalar(std), "min": scalar(low), "max": scalar(high)}


def raw_input(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Data that meets trainable weights directly: figures over all, and for rows of features over each column.

    ``columns`` holds the root mean square and the deviation of each of the first 256 columns. Data joined to something learned
    (``cat`` with an embedding) counts as well, and a factor of its own (``mul``).
    """
    flat = [t for a in args for t in (a if isinstance(a, list | tuple) else (a,)) if isinstance(t, torch.Tensor)]
    learned = any(t.requires_grad for t in flat) if name == "cat" else any(t.requires_grad and t.is_leaf for t in flat)
    if not learned:
        return {}
    axes = 1 if name == "mul" else 2
    data = next((t for t in flat if t.dim() >= axes and not t.requires_grad and t.is_floating_point()), None)
    if data is None or (name == "mul" and data.numel() < 8) or (found := spread(data)) is None:
        return {}
    if data.dim() in (2, 3):
        columns = data.detach().reshape(-1, data.shape[-1])[:2048, :256].float()
        std, mean = torch.std_mean(columns, 0, unbiased=False)
        found["columns"] = {"rms": numbers((std.square() + mean.square()).sqrt()), "std": numbers(std)}
    return {"raw": {**found, "shape": list(data.shape)}}


def residual(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """A prediction set against data by hand: ``prediction`` carries a gradient, ``target`` does not; with ``log`` the prediction is
    a logarithm that the target weighs."""
    if len(args) < 2 or not all(isinstance(a, torch.Tensor) for a in args[:2]):
        return {}
    first, second = args[0], args[1]
    if first.requires_grad is second.requires_grad or first.dim() == 0 or second.dim() == 0:
        return {}
    made, given = (first, second) if first.requires_grad else (second, first)
    log = name == "mul"
    if made.is_leaf or (log and (made.grad_fn is None or made.grad_fn.name() not in LIKELIHOODS)):
        return {}
    prediction, target = spread(made), spread(given)
    if prediction is None or target is None:
        return {}
    y = given.detach().flatten()[:SIZE]
    shares = {"below_zero": y < -1e-6, "above_one": y > 1 + 1e-6, "below_minus_one": y < -1 - 1e-6}
    return {"residual": {"prediction": prediction, "target": {**target, **{k: scalar(v.float().mean()) for k, v in shares.items()}}, "log": log}}


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
    elif name == "embedding":
        return padded(argument(0, "input"))
    elif torch.is_grad_enabled() and name in WEIGHTED:
        return raw_input(name, args)
    elif torch.is_grad_enabled() and name in ("sub", "mul"):
        return residual(name, args) or (raw_input(name, args) if name == "mul" else {})
    return {}
