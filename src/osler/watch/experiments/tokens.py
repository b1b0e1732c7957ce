"""``token-shift``: by how many positions the target of a sequence model is moved against its input tokens."""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.layout import AGREE, LABELS, _shifts
from osler.watch.experiments.nested import leaves
from osler.watch.experiments.subject import figure, is_mask


def token_shift(capture: Capture) -> dict[str, Any] | None:
    """The shift at which the target repeats the first integer input [samples, steps], or ``None`` where it never does.

    ``others``: shifts of the step's other targets, for models that predict several positions at once.
    """
    inputs = [(p, t) for p, t in leaves((capture.args, capture.kwargs)) if not t.is_floating_point() and t.dim() == 2 and not is_mask(t) and p[-1] not in LABELS]
    if not inputs or capture.target is None:
        return None
    path, tokens = inputs[0]
    labels = next((t for p, t in leaves((capture.args, capture.kwargs)) if t.dim() == 2 and t.shape == tokens.shape and not t.is_floating_point()
                   and (p[-1] in LABELS or p == (0, 1)) and p != path), None)
    row: dict[str, Any] | None = None
    others = []
    for target in (capture.target, *capture.targets):
        if target.is_floating_point():
            continue
        found = max((s for s in _shifts(path, tokens, target, 1)), key=lambda s: (s.share, -abs(s.by - 1)), default=None)
        if found is None or found.share < AGREE:
            continue
        if target is capture.target:
            row = {"root": capture.root_id, "shift": found.by, "share": figure(found.share), "unmoved": figure(found.unmoved), "steps": tokens.shape[1],
                   "labels_given": labels is not None, "labels_equal_inputs": bool(labels is not None and torch.equal(labels, tokens)), "at": None}
        else:
            others.append(found.by)
    if row is not None:
        row["others"] = sorted(set(others))
    return row
