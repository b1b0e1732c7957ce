"""Figures about 16-bit numbers: operations that overflow or underflow in float16, steps that the weights' spacing swallows, gradients
at the lower end of float16. Taken while a trace is recorded and at sampled steps, CPU tensors only.
"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.compiler import quiet
from osler.watch.readout import numbers, on_cpu, scalar
from osler.watch.session import Session

LIMIT = 1 << 20
INTENDED = frozenset(("masked_fill", "masked_fill_", "full", "full_like", "new_full", "fill_", "tensor", "where", "triu", "tril", "setitem_", "cat", "stack", "getitem",
                      "expand", "zeros_like", "empty", "empty_like", "clone", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "detach"))
"""Operations that write an infinity on purpose, or only pass one on."""
SMALL = 2.0**-14
"""The smallest normal number of float16; below it precision goes bit by bit down to 2^-24."""
MAX_SAMPLES = 40


def _tensors(values: Any, depth: int = 2) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and isinstance(value, list | tuple):
            found.extend(_tensors(value, depth - 1))
    return found


def half_figures(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[str, Any]:
    """``overflow``: this operation made infinities or NaN of finite operands, one side being float16. ``underflow``: share of a
    result that is 0 although no operand was."""
    if name in INTENDED:
        return {}
    made = [t for t in _tensors((out,)) if t.is_floating_point() and on_cpu(t) and 0 < t.numel() <= LIMIT]
    if not made:
        return {}
    given = [t for t in _tensors((*args, *kwargs.values())) if t.is_floating_point() and on_cpu(t) and t.numel() <= LIMIT]
    with torch.no_grad():
        bad = [n for t in made for n in [int(t.numel() - scalar(torch.isfinite(t.detach()).sum()))]]
        if sum(bad):
            if given and all(scalar(torch.isfinite(t.detach()).all()) == 1.0 for t in given if t.numel()):
                return {"overflow": {"nonfinite": sum(bad), "numel": sum(t.numel() for t in made), "largest": max((scalar(t.detach().abs().max()) for t in given if t.numel()), default=0.0),
                                     "zero": any(scalar((t.detach() == 0).any()) == 1.0 for t in given)}}
            return {}
        if name in ("prod", "mul", "pow", "square", "exp", "softmax", "cumprod", "div", "to", "half") and made[0].dtype == torch.float16 and given:
            zero = scalar((made[0].detach() == 0).float().mean())
            if zero > 0.05 and all(scalar((t.detach() == 0).any()) == 0.0 for t in given):
                return {"underflow": zero}
    return {}


class Halves:
    """What sampled steps say about 16-bit weights and gradients, by optimizer and by parameter."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps: dict[int, dict[str, Any]] = {}
        self.gradients: dict[int, dict[str, Any]] = {}
        session.finishers.append(self.finish)

    @quiet
    def look(self, optimizer: int, parameters: list[torch.Tensor], weights: list[torch.Tensor], grads: list[torch.Tensor], changes: Any) -> None:
        low = [i for i, p in enumerate(parameters) if p.dtype in (torch.bfloat16, torch.float16)]
        if low:
            self._weights(optimizer, [parameters[i] for i in low], [weights[i] for i in low], [grads[i] for i in low], [changes[i] for i in low], len(parameters))
        if self.session.half or any(parameters[i].dtype == torch.float16 for i in low):
            self._gradients(parameters, grads)

    def _weights(self, optimizer: int, parameters: list[torch.Tensor], weights: list[torch.Tensor], grads: list[torch.Tensor], changes: list[torch.Tensor], of: int) -> None:
        row = self.steps.setdefault(optimizer, {"dtype": str(parameters[0].dtype).removeprefix("torch."), "parameters": 0, "of": of, "samples": []})
        row["parameters"], row["of"] = max(row["parameters"], len(parameters)), max(row["of"], of)
        if len(row["samples"]) >= MAX_SAMPLES:
            return
        pushed = sum(numbers(torch.stack([torch.count_nonzero(g) for g in grads])))
        stuck = sum(numbers(torch.stack([torch.count_nonzero((g != 0) & (c == 0)) for g, c in zip(grads, changes, strict=True)])))
        if pushed:
            row["samples"].append([self.session.step, stuck / pushed])

    def _gradients(self, parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        for parameter, grad in zip(parameters, grads, strict=True):
            uid = self.session.registry.uid(parameter)
            row = self.gradients.setdefault(uid, {"uid": uid, "samples": []})
            if len(row["samples"]) >= MAX_SAMPLES or grad.numel() == 0:
                continue
            values = grad.detach().flatten()[:65536].float().abs()
            values = values[values > 0]
            n = values.numel()
            scaled = values * 2.0**24
            tiny = values < SMALL
            row["samples"].append([self.session.step, 1 - n / min(grad.numel(), 65536), scalar(tiny.float().mean()) if n else 0.0,
                                   scalar((scaled == scaled.round())[tiny].float().mean()) if n and bool(scalar(tiny.any())) else 0.0,
                                   scalar(values.median()) if n else 0.0])

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        for optimizer, row in self.steps.items():
            self.session.fact("half-weights", None, optimizer=optimizer, **row)
        if self.gradients:
            self.session.fact("half-gradients", None, columns=["step", "zero", "tiny", "grid", "median"], params=list(self.gradients.values())[:200])
