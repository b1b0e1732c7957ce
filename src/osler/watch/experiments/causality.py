"""``causality``: where the target is the input moved by one, may an output at one position see later positions?"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from osler.watch.experiments.layout import Batch, Layout, Shift
from osler.watch.experiments.nested import Path
from osler.watch.experiments.readings import FREE, MIXED, foreign_effect, own_change
from osler.watch.experiments.record import Recorder, describe, first
from osler.watch.experiments.subject import Subject, Tensors, Unclear, figure

EFFECT = 1e-4


def causality(subject: Subject, layout: Layout, batch: Batch, shift: Shift | None) -> dict[str, Any]:
    """Replaces everything after the middle position and looks at the outputs up to it.

    The fact is written for every task whose target repeats the input: with ``shift`` 1 a ``leak`` makes the task trivial; with
    ``shift`` 0 the target was never moved.
    """
    if shift is None:
        raise Unclear("the target is not the input moved by a few positions")
    if not batch.repeats:
        raise Unclear("two passes with the same random state differ")
    inputs, steps, base = _clip(subject, batch, shift)
    last = steps // 2 - 1
    allowed = torch.arange(steps) > last
    new = _later_replaced(inputs, shift, allowed)
    after = subject.run(new)
    effect, position = 0.0, -1
    still = _without_positions(subject, inputs, batch, shift, base)
    judged = [p for p, t in base.items() if p not in still and t.is_floating_point() and own_change(t, after[p], steps, allowed, EFFECT / 10) != FREE]
    if not judged:
        raise Unclear("no output has an axis that counts the positions")
    for path in judged:
        if _square(base[path], steps):
            continue
        found, at = foreign_effect(base[path], after[path], steps, allowed)
        if found > effect:
            effect, position = found, at
    leak = effect > EFFECT
    row: dict[str, Any] = {
        "root": subject.capture.root_id, "leak": leak, "effect": figure(effect), "position": position if leak else None, "steps": steps,
        "changed_after": last, "target_is_shifted_input": shift.by == 1, "shift": shift.by, "agreement": figure(shift.share),
        "target_equals_input": figure(shift.unmoved), "time_axis": shift.axis, **describe(None, subject)}
    if leak:
        before, changed = Recorder(), Recorder()
        subject.run(inputs, watch=before)
        subject.run(new, watch=changed)
        judge = partial(_judge, steps=steps, allowed=allowed)
        row |= describe(first(before.ops, changed.ops, judge), subject)
    return row


def _square(tensor: torch.Tensor, steps: int) -> bool:
    return list(tensor.shape).count(steps) >= 2


def _judge(before: torch.Tensor, after: torch.Tensor, steps: int, allowed: torch.Tensor) -> str:
    """A matrix position by position holds future scores until a mask removes them: it is not judged itself."""
    state = own_change(before, after, steps, allowed, EFFECT / 10)
    return FREE if state == MIXED and _square(before, steps) else state


def _clip(subject: Subject, batch: Batch, shift: Shift) -> tuple[Tensors, int, Tensors]:
    """The batch, cut to a number of steps that no other axis has, if the module takes shorter sequences."""
    steps = batch.inputs[shift.path].shape[shift.axis]
    taken = {size for t in (*subject.root.parameters(), *subject.root.buffers()) for size in t.shape} | {batch.n, 1}
    for wish in range(steps, max(steps - 6, 3), -1):
        if wish in taken and wish != steps:
            continue
        if wish == steps and steps not in taken:
            break
        if wish == steps:
            continue
        cut = _shortened(subject, batch.inputs, batch, steps, wish)
        try:
            return cut, wish, subject.run(cut)
        except Exception:
            break
    return batch.inputs, steps, batch.base


def _shortened(subject: Subject, inputs: Tensors, batch: Batch, steps: int, wish: int) -> Tensors:
    """Inputs whose axis of positions is cut from ``steps`` to ``wish``."""
    source = {**subject.inputs, **inputs}
    axes = {p: next((a for a, size in enumerate(t.shape) if size == steps and a != batch.axes.get(p)), None) for p, t in source.items()}
    return inputs | {p: source[p].detach().narrow(a, 0, wish) for p, a in axes.items() if a is not None}


def _without_positions(subject: Subject, inputs: Tensors, batch: Batch, shift: Shift, base: Tensors) -> set[Path]:
    """Outputs of the same shape for a shorter sequence, such as a final hidden state: none of their axes counts positions."""
    steps = inputs[shift.path].shape[shift.axis]
    if len(base) < 2 or steps < 4:
        return set()
    try:
        shorter = subject.run(_shortened(subject, inputs, batch, steps, steps - 1))
    except Exception:
        return set()
    return {p for p, t in base.items() if p in shorter and shorter[p].shape == t.shape}


def _later_replaced(inputs: Tensors, shift: Shift, later: torch.Tensor) -> Tensors:
    """Other values of the batch at the positions ``later``: the samples change places and the tokens their order."""
    x = inputs[shift.path].movedim(shift.axis, 0).clone()
    tail = x[later]
    if x.is_floating_point():
        scale = float(tail.std()) if tail.numel() > 1 else 1.0
        x[later] = tail.flip(0) + (scale or 1.0) * (0.5 + torch.arange(tail.numel()).reshape(tail.shape).remainder(3).to(tail.dtype))
    else:
        values = x.unique()
        place = torch.searchsorted(values, tail.contiguous())
        step = 1 + torch.arange(tail.numel()).reshape(tail.shape).remainder(max(len(values) - 1, 1))
        x[later] = values[(place + step).remainder(len(values))]
    return {**inputs, shift.path: x.movedim(0, shift.axis)}
