"""``input-independence``: do the outputs depend on the input at all?"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.experiments.layout import Batch, Layout
from osler.watch.experiments.readings import relative
from osler.watch.experiments.subject import Subject, Tensors, Unclear, figure, perturbable

PATIENCE = 0.2


def input_independence(subject: Subject, layout: Layout, batch: Batch, woken: int) -> dict[str, Any]:
    """``spread``: standard deviation of the outputs over the samples, relative to their size, in evaluation mode over as many captured
    samples as time allows; ``input_spread`` likewise for the input; ``zeroed``: largest relative change when the input's content is
    replaced by zeros; ``woken``: number of all-zero weights that were given values first."""
    n = min(layout.n, max(batch.n, int(batch.n * PATIENCE / max(subject.seconds, 1e-6))))
    some = batch.take(torch.arange(n) * layout.n // n) if batch.n < layout.n else batch.inputs
    base = subject.run(some)
    main = some[layout.main]
    paths = [p for p, t in base.items() if t.is_floating_point() and n in t.shape]
    wanted = subject.outputs
    exact = [p for p in paths if subject.capture.criterion_input is not None and p in wanted and wanted[p].numel() == subject.capture.criterion_input.numel()]
    if not (exact or paths):
        raise Unclear("no output has an axis that counts the samples")
    empty: Tensors = {p: torch.zeros_like(some[p]) for p in perturbable(some, layout.axes)}
    without = subject.run({**some, **empty})
    # Of several outputs the most dependent one counts: a mixture of one component has constant weights.
    spread = max(_spread(base[p], _axis(base[p], layout.axis, n)) for p in exact or paths)
    zeroed = max((float(relative(base[p], without[p]).max()) for p in exact or paths if p in without and without[p].shape == base[p].shape),
                 default=float("nan"))
    return {"root": subject.capture.root_id, "samples": n, "spread": figure(spread), "input_spread": figure(_spread(main, layout.axis)),
            "zeroed": figure(zeroed), "woken": woken, "at": None}


def _axis(tensor: torch.Tensor, usual: int, n: int) -> int:
    return usual if usual < tensor.dim() and tensor.shape[usual] == n else list(tensor.shape).index(n)


def _spread(tensor: torch.Tensor, axis: int) -> float:
    rows = tensor.double().movedim(axis, 0).reshape(tensor.shape[axis], -1)
    size = float(rows.square().mean().sqrt())
    return float(rows.std(0).square().mean().sqrt()) / size if size else 0.0
