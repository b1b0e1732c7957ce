"""``batch-mixing``: does the output for one sample depend on the other samples of the batch, and on its place among them?"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import torch

from osler.watch.experiments.layout import Batch, Layout
from osler.watch.experiments.nested import Path
from osler.watch.experiments.readings import MIXED, follows, foreign_effect, own_change
from osler.watch.experiments.record import Op, Recorder, describe, first
from osler.watch.experiments.subject import Subject, Unclear, figure

EFFECT = 1e-4
ORDER_EFFECT = 1e-3
HALF_EFFECT = 3e-2
PATIENCE = 0.3


def batch_mixing(subject: Subject, layout: Layout, batch: Batch, random: bool) -> dict[str, Any]:
    """Changes one sample and looks at the others; then changes the order.

    Args:
        random: two passes with different random states differ, so the order of samples cannot be judged.
    """
    if not batch.repeats:
        raise Unclear("two passes with the same random state differ")
    if not batch.judged:
        raise Unclear("no output has an axis that counts the samples")
    effect, index, mixed, own = _others(batch)
    row: dict[str, Any] = {
        "root": subject.capture.root_id, "samples": batch.n, "mixed": mixed, "effect": figure(effect), "axis": layout.axis, "axis_by": layout.by,
        "square_input": layout.graph, "fixed_size": batch.fixed, "square_output": any(batch.judged.values()), "order": None, "inside": False,
        **describe(None, subject)}
    if mixed and layout.ambiguous and not _other_axis_mixes(subject, layout):
        row |= {"unclear": True, "why": "the input may be time-first: along its second axis nothing mixes"}
    if mixed:
        row |= describe(_first_mixing(batch, index), subject)
    elif not own and (op := _first_mixing(batch, index)) is not None:
        # Not even the changed sample's own output moved: samples may mix in values that never reach the output.
        row |= {"inside": True, **describe(op, subject)}
    elif not random:
        order = torch.arange(batch.n).roll(1)
        row["order"], op = _order(batch, order)
        row |= describe(op, subject) if op else {}
    return row


def _tolerance(tensor: torch.Tensor, usual: float) -> float:
    return HALF_EFFECT if tensor.dtype in (torch.float16, torch.bfloat16) else usual


def _others(batch: Batch) -> tuple[float, int, bool, bool]:
    """Changes one sample after the other: largest effect on others; the sample that had it; whether it counts; whether any output
    changed at all."""
    best, own = (0.0, batch.n // 2, False), False
    begin = perf_counter()
    # A recurrence along the batch reaches only the samples after the changed one, a reshape perhaps only some.
    for turn, index in enumerate(dict.fromkeys((batch.n // 2, 0, batch.n - 1, *range(batch.n)))):
        if turn >= 3 and perf_counter() - begin > PATIENCE:
            break
        after = batch.subject.run(batch.changed(index))
        allowed = torch.arange(batch.n) == index
        for path in batch.judged:
            if path not in after or after[path].shape != batch.base[path].shape:
                continue
            own = own or not torch.equal(after[path], batch.base[path])
            effect, _ = foreign_effect(batch.base[path], after[path], batch.n, allowed)
            if effect > best[0]:
                best = (effect, index, effect > _tolerance(after[path], EFFECT))
        if best[2]:
            break
    return *best, own


def _other_axis_mixes(subject: Subject, layout: Layout) -> bool:
    other = 1 - layout.axis
    if subject.inputs[layout.main].dim() < 2 or subject.inputs[layout.main].shape[other] < 2:
        return True
    try:
        batch = Batch(subject, layout.along(subject.inputs, other), subject.inputs[layout.main].shape[other])
        return not batch.judged or _others(batch)[2]
    except Exception:
        return True


def _record(batch: Batch, inputs: dict[Path, torch.Tensor]) -> list[Op]:
    recorder = Recorder()
    batch.subject.run(inputs, watch=recorder)
    return recorder.ops


def _first_mixing(batch: Batch, index: int) -> Op | None:
    judge = partial(own_change, n=batch.n, allowed=torch.arange(batch.n) == index, tolerance=EFFECT / 10)
    return first(_record(batch, batch.inputs), _record(batch, batch.changed(index)), judge)


def _order(batch: Batch, order: torch.Tensor) -> tuple[bool | None, Op | None]:
    try:
        after = batch.subject.run(batch.reordered(order))
    except Exception:
        # Sequences packed in order of length do not take another order.
        return None, None
    for path in batch.judged:
        tolerance = _tolerance(batch.base[path], ORDER_EFFECT)
        if path in after and follows(batch.base[path], after[path], order, tolerance) == MIXED:
            judge = partial(follows, order=order, tolerance=tolerance)
            return False, first(_record(batch, batch.inputs), _record(batch, batch.reordered(order)), judge)
    return True, None
