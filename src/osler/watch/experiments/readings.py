"""Which elements of a tensor belong to which sample, when only the number of samples is known.

An operation may move the batch axis, merge it with others (``[B * T, V]``, ``[T, B * heads, D]``) or drop it. A *reading* takes one axis
as ``(outer, n, inner)`` and calls the middle one the samples. A change that some reading confines to the sample that was
changed is that sample's own; a change that no reading confines has reached others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

SAME, OWN, FREE, MIXED = "same", "own", "free", "mixed"
MAX_SPLITS = 24


def rows(tensor: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    """All readings of ``tensor`` as ``[n, rest]``, plain axes first."""
    plain = [a for a, size in enumerate(tensor.shape) if size == n]
    merged = [a for a, size in enumerate(tensor.shape) if size > n and size % n == 0]
    for axis in plain:
        yield tensor.movedim(axis, 0).reshape(n, -1)
    for axis in merged:
        rest = tensor.shape[axis] // n
        splits = [p for p in range(1, rest + 1) if rest % p == 0][:MAX_SPLITS]
        for outer in {1: 0, rest: 0, **dict.fromkeys(splits, 0)}:
            shape = (*tensor.shape[:axis], outer, n, rest // outer, *tensor.shape[axis + 1:])
            yield tensor.reshape(shape).movedim(axis + 1, 0).reshape(n, -1)


def changed(before: torch.Tensor, after: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Element-wise: differs by more than ``tolerance`` of the tensor's typical size (exactly, if not floating point)."""
    if not (before.is_floating_point() or before.is_complex()):
        return before != after
    return ~(relative(before, after) <= tolerance)


def relative(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """|difference| / root mean square, 0 where both are the same infinity or not a number."""
    if not (before.is_floating_point() or before.is_complex()):
        before, after = before.double(), after.double()
    wide = torch.complex128 if before.is_complex() else torch.float64
    a, b = before.to(wide), after.to(wide)
    alike = (a == b) | (torch.isnan(a) & torch.isnan(b))
    finite = a.abs()[torch.isfinite(a)]
    size = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    apart = (a - b).abs() / max(size, 1e-30)
    return torch.where(alike, torch.zeros_like(apart), torch.where(torch.isnan(apart), torch.full_like(apart, torch.inf), apart))


def own_change(before: torch.Tensor, after: torch.Tensor, n: int, allowed: torch.Tensor, tolerance: float) -> str:
    """How an output changed when only the samples (or positions) ``allowed`` (bool, ``[n]``) of the input did."""
    if before.shape != after.shape:
        return FREE
    mask = changed(before, after, tolerance)
    if not bool(mask.any()):
        return SAME
    seen = False
    for reading in rows(mask, n):
        seen = True
        if not bool(reading.any(1)[~allowed].any()):
            return OWN
    return MIXED if seen else FREE


def foreign_effect(before: torch.Tensor, after: torch.Tensor, n: int, allowed: torch.Tensor) -> tuple[float, int]:
    """Largest relative change outside ``allowed`` under the kindest reading, and the first index it occurs at."""
    best = (float("inf"), -1)
    for reading in rows(relative(before, after), n):
        worst = reading.amax(1).masked_fill(allowed, 0.0) if reading.numel() else torch.zeros(n)
        top = float(worst.max())
        if top < best[0]:
            best = (top, int((worst > top * 1e-3).nonzero()[0]) if top else -1)
    return best if best[0] != float("inf") or best[1] >= 0 else (0.0, -1)


def follows(before: torch.Tensor, after: torch.Tensor, order: torch.Tensor, tolerance: float) -> str:
    """Whether an output follows when the samples of the input are taken in ``order``."""
    if before.shape != after.shape:
        return FREE
    if not bool(changed(before, after, tolerance).any()):
        return SAME
    seen = False
    for a, b in zip(rows(before, len(order)), rows(after, len(order)), strict=True):
        seen = True
        if not bool(changed(a[order], b, tolerance).any()):
            return OWN
    return MIXED if seen else FREE
