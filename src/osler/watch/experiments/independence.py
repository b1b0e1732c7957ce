"""``input-independence``: do the outputs depend on the input at all?"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.experiments.layout import Layout
from osler.watch.experiments.readings import relative
from osler.watch.experiments.subject import Subject, Tensors, Unclear, figure, perturbable


def input_independence(subject: Subject, layout: Layout) -> dict[str, Any]:
    """``spread``: standard deviation of the outputs over the samples, relative to their size, in evaluation mode over all captured
    samples; ``input_spread`` likewise for the input; ``zeroed``: largest relative change when the input's content is replaced by zeros."""
    base = subject.run()
    main = subject.inputs[layout.main]
    paths = [p for p, t in base.items() if t.is_floating_point() and t.dim() and layout.n in t.shape]
    wanted = subject.capture.criterion_input
    exact = [p for p in paths if wanted is not None and base[p].numel() == wanted.numel()]
    if not (exact or paths):
        raise Unclear("no output has an axis that counts the samples")
    path = (exact or paths)[0]
    out = base[path]
    axis = layout.axis if layout.axis < out.dim() and out.shape[layout.axis] == layout.n else list(out.shape).index(layout.n)
    empty: Tensors = {p: torch.zeros_like(subject.inputs[p]) for p in perturbable(subject.inputs, layout.axes)}
    without = subject.run(empty)
    zeroed = float(relative(out, without[path]).max()) if path in without and without[path].shape == out.shape else float("nan")
    return {"root": subject.capture.root_id, "samples": layout.n, "spread": figure(_spread(out, axis)),
            "input_spread": figure(_spread(main.detach(), layout.axis)), "zeroed": figure(zeroed), "at": None}


def _spread(tensor: torch.Tensor, axis: int) -> float:
    rows = tensor.double().movedim(axis, 0).reshape(tensor.shape[axis], -1)
    size = float(rows.square().mean().sqrt())
    return float(rows.std(0).square().mean().sqrt()) / size if size else 0.0
