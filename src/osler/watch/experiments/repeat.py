"""``pass-repeat`` and ``input-mutated``: does a forward pass give the same twice, and leave its inputs alone?"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.experiments.nested import Path
from osler.watch.experiments.readings import MIXED, SAME, foreign_effect
from osler.watch.experiments.record import Recorder, describe, first
from osler.watch.experiments.subject import Subject, Tensors, figure

FLOOR = 1e-6


def _apart(before: Tensors, after: Tensors) -> float:
    """Largest relative difference of two passes' outputs."""
    if before.keys() != after.keys() or any(t.shape != after[p].shape for p, t in before.items()):
        return float("inf")
    return max((foreign_effect(t.reshape(1, -1), after[p].reshape(1, -1), 1, torch.tensor([False]))[0] for p, t in before.items() if t.numel()),
               default=0.0)


def _differs(before: torch.Tensor, after: torch.Tensor) -> str:
    return SAME if _apart({(): before}, {(): after}) <= FLOOR else MIXED


def pass_repeat(subject: Subject, inputs: Tensors, mode: str) -> dict[str, Any]:
    """Two passes over the same batch.

    In evaluation mode the random generators run on between them: a difference is randomness (dropout without its training
    flag, sampling, a layer built in forward) or memory. In training mode both start from the same random state and the same
    buffers: a difference is memory, kept somewhere else.
    """
    buffers = [(b, b.clone()) for b in subject.root.buffers()]

    def twice(*watch: Recorder) -> float:
        first_watch, second_watch = watch or (None, None)
        one = subject.run(inputs, seed=0, watch=first_watch)
        if mode == "train":
            for buffer, value in buffers:
                buffer.copy_(value)
        return _apart(one, subject.run(inputs, seed=1 if mode == "eval" else 0, watch=second_watch))

    effect = twice()
    row: dict[str, Any] = {"root": subject.capture.root_id, "mode": mode, "same": effect <= FLOOR, "effect": figure(effect), "random": None,
                           **describe(None, subject)}
    if effect > FLOOR:
        before, after = Recorder(), Recorder()
        twice(before, after)
        row |= describe(first(before.ops, after.ops, _differs), subject)
        if mode == "eval":
            row["random"] = _apart(subject.run(inputs), subject.run(inputs)) <= FLOOR
    return row


def input_mutated(subject: Subject, inputs: Tensors) -> dict[str, Any]:
    """Whether forward writes into its input tensors; ``view``: the input is a part of a larger tensor, which is written too."""
    kept = {path: t.detach() for path, t in {**subject.inputs, **inputs}.items()}
    given = {path: t.clone() for path, t in kept.items()}
    subject.run(given, keep=True)
    written: list[Path] = [p for p, t in given.items() if _apart({(): kept[p]}, {(): t}) > 0]
    row: dict[str, Any] = {"root": subject.capture.root_id, "mutated": bool(written), "view": False, "effect": 0.0, **describe(None, subject)}
    if written:
        row["view"] = any(subject.inputs[p]._base is not None for p in written)
        row["effect"] = figure(max(_apart({(): kept[p]}, {(): given[p]}) for p in written))
        again = {path: t.clone() for path, t in kept.items()}
        recorder = Recorder(writes_to=[t.untyped_storage().data_ptr() for t in again.values()])
        subject.run(again, watch=recorder, keep=True)
        row |= describe(recorder.writers[0] if recorder.writers else None, subject)
    return row
