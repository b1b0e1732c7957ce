"""``input-independence``: do the outputs depend on the input at all?"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.experiments.layout import Batch, Layout
from osler.watch.experiments.readings import relative
from osler.watch.experiments.subject import Subject, Tensors, Unclear, figure, perturbable

PATIENCE = 0.2


def input_independence(subject: Subject, layout: Layout, batch: Batch) -> dict[str, Any]:
    """``spread``: standard deviation of the outputs over the samples, relative to their size, in evaluation mode over as many captured
    samples as time allows; ``input_spread`` likewise for the input; ``zeroed``: largest relative change when the input's content is
    replaced by zeros."""
    n = min(layout.n, max(batch.n, int(batch.n * PATIENCE / max(subject.seconds, 1e-6))))
    some = batch.take(torch.arange(n) * layout.n // n) if batch.n < layout.n else batch.inputs
    base = subject.run(some)
    main = some[layout.main]
    paths = [p for p, t in base.items() if t.is_floating_point() and n in t.shape]
    wanted = subject.outputs
    exact = [p for p in paths if subject.capture.criterion_input is not None and p in wanted and wanted[p].numel() == subject.capture.criterion_input.numel()]
    if not (exact or paths):
        raise Unclear("no output has an axis that counts the samples")
    path = (exact or paths)[0]
    out = base[path]
    axis = layout.axis if layout.axis < out.dim() and out.shape[layout.axis] == n else list(out.shape).index(n)
    empty: Tensors = {p: torch.zeros_like(some[p]) for p in perturbable(some, layout.axes)}
    without = subject.run({**some, **empty})
    zeroed = float(relative(out, without[path]).max()) if path in without and without[path].shape == out.shape else float("nan")
    return {"root": subject.capture.root_id, "samples": n, "spread": figure(_spread(out, axis)),
            "input_spread": figure(_spread(main, layout.axis)), "zeroed": figure(zeroed), "at": None}


def _spread(tensor: torch.Tensor, axis: int) -> float:
    rows = tensor.double().movedim(axis, 0).reshape(tensor.shape[axis], -1)
    size = float(rows.square().mean().sqrt())
    return float(rows.std(0).square().mean().sqrt()) / size if size else 0.0
