"""Class counts and pulls of a criterion: which labels it sees, which classes are predicted, and with what factor (and sign) its
value enters the objective. Sampled calls on CPU tensors only.

The pull is read in the backward pass that follows, from the gradient that reaches the criterion's own node: 1 where the value is
the objective, -1 where it is negated, 1/16 where it is divided by 16; for ``reduction="none"`` it is one number an element.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from osler.watch.compiler import quiet
from osler.watch.readout import integers, numbers, on_cpu, scalar

CLASSES = 64
ELEMENTS = 1 << 16
LATE = 16
HOOKED = 8
FEW = 6
"""Rows of a class below which more calls are summed up."""
LABELS = ("targets", "labels", "y", "ys", "label", "target")


class Tally:
    """Running counts of one criterion at one line."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.labels: list[int] = []
        self.late: deque[tuple[list[int], list[int], list[int]]] = deque(maxlen=LATE)
        self.calls = 0
        self.pulls: list[float] = []
        self.by_class: dict[int, list[float]] = {}
        self.fixed = True
        self.looked = 0

    def to_json(self) -> dict[str, Any]:
        found = dict(self.info)
        if self.labels:
            found["label_counts"] = self.labels
        newest = list(self.late)[-max(1, min(LATE, self.calls // 3)):]
        if newest and min((sum(n[0][c] for n in newest) for c, total in enumerate(self.labels) if total), default=FEW) < FEW:
            newest = list(self.late)[-max(1, min(LATE, 2 * self.calls // 3)):]  # a rare class: all but the first third
        if newest:
            found["late"] = {key: [sum(column) for column in zip(*(n[i] for n in newest), strict=True)]
                             for i, key in enumerate(("labels", "predicted", "hits"))}
        if self.pulls:
            found["pull"] = {"n": len(self.pulls), "first": self.pulls[0], "min": min(self.pulls), "max": max(self.pulls)}
        if self.by_class:
            found["class_pull"] = {str(c): a / n for c, (a, n) in sorted(self.by_class.items()) if n}
            found["class_pull_fixed"] = self.fixed
        return found

    def look(self, function: str, value: torch.Tensor, target: Any, result: Any, kwargs: dict[str, Any], ignore: int) -> None:
        """One sampled call; nothing is changed."""
        if not isinstance(target, torch.Tensor) or not on_cpu(value) or not on_cpu(target):
            return
        for key in ("weight", "pos_weight"):
            given = kwargs.get(key)
            if isinstance(given, torch.Tensor) and key not in self.info.get("weights", {}) and 0 < given.numel() <= CLASSES:
                self.info.setdefault("weights", {})[key] = numbers(given)
        with torch.no_grad():
            rows = value.shape[0] if value.dim() else 1
            kept = max(1, rows * ELEMENTS // max(target.numel(), 1)) if target.numel() > ELEMENTS and target.dim() and target.shape[0] == rows else rows
            y, picked = self._answers(function, value.detach()[:kept] if kept < rows else value.detach(), target.detach()[:kept] if kept < rows else target.detach(), ignore)
            if y is not None and picked is not None:
                self._count(y, picked[0], picked[1])
            given = kwargs.get("weight")
            if y is not None and function.startswith("binary") and isinstance(given, torch.Tensor) and given.numel() == y.numel() > 1 and self.looked < HOOKED:
                self._by_class(given.detach().flatten(), y, 1.0)
        if isinstance(result, torch.Tensor) and result.grad_fn is not None and self.looked < HOOKED:
            self.looked += 1
            self._hook(result, y if y is not None and y.numel() == result.numel() else None)

    def _answers(self, function: str, value: torch.Tensor, target: torch.Tensor, ignore: int) -> tuple[torch.Tensor | None, tuple[torch.Tensor, int] | None]:
        """Integer labels and predicted classes, flat; columns of several labels at once are only counted."""
        if function in ("cross_entropy", "nll_loss", "multi_margin_loss") and not target.is_floating_point() and value.dim() >= 2 \
                and 1 < value.shape[1] <= CLASSES and value.shape[0] == target.shape[0] and target.numel() <= ELEMENTS:
            picked, y = value.argmax(1).flatten(), target.flatten()
            if picked.numel() != y.numel():
                return None, None
            return torch.where((y == ignore) | (y < 0) | (y >= value.shape[1]), -1, y), (picked, value.shape[1])
        if function in ("binary_cross_entropy", "binary_cross_entropy_with_logits") and target.numel() <= ELEMENTS and value.shape == target.shape:
            if value.dim() >= 2 and 1 < value.shape[1] <= CLASSES and value.dim() == 2:
                share = numbers((target > 0.5).float().mean(0))
                old = self.info.get("positive_shares")
                n = self.calls + 1
                self.info["positive_shares"] = share if old is None else [a + (b - a) / n for a, b in zip(old, share, strict=False)]
                self.calls = n
                return None, None
            if value.dim() > 2 and not bool(scalar(((target == 0) | (target == 1)).all())):
                return None, None
            bound = 0.0 if function.endswith("logits") else 0.5
            return (target > 0.5).long().flatten(), ((value > bound).long().flatten(), 2)
        return None, None

    def _count(self, y: torch.Tensor, picked: torch.Tensor, classes: int) -> None:
        self.calls += 1
        kept = y >= 0
        y, picked = y[kept].long(), picked[kept]
        rows = tuple(integers(torch.bincount(t, minlength=classes)) for t in (y, picked, y[y == picked]))
        self.late.append(rows)  # type: ignore[arg-type]
        self.labels = [a + b for a, b in zip(self.labels, rows[0], strict=True)] if len(self.labels) == len(rows[0]) else rows[0]

    def _hook(self, result: torch.Tensor, labels: torch.Tensor | None) -> None:
        scale = 1 if result.dim() == 0 else result.numel()

        def read(grads: tuple[torch.Tensor | None, ...]) -> None:
            try:
                grad = grads[0]
                if grad is None or not on_cpu(grad) or len(self.pulls) >= 4 * HOOKED:
                    return
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    self.pulls.append(scalar(grad.detach().sum()))
                    if labels is not None and scale > 1 and grad.numel() == labels.numel():
                        self._by_class(grad.detach().flatten(), labels, float(scale))
            except Exception:  # a reading that fails is a gap, never the user's error
                return

        assert result.grad_fn is not None
        result.grad_fn.register_prehook(quiet(read))

    def _by_class(self, values: torch.Tensor, labels: torch.Tensor, scale: float) -> None:
        for c in range(min(CLASSES, int(scalar(labels.max())) + 1)):
            own = values[labels == c].float()
            if own.numel():
                pair = self.by_class.setdefault(c, [0.0, 0.0])
                pair[0] += scalar(own.sum()) * scale
                pair[1] += own.numel()
                self.fixed = self.fixed and scalar(own.max() - own.min()) <= 1e-3 * abs(scalar(own.mean()))


def labels_of(dataset: Any) -> torch.Tensor | None:
    """Integer labels of a map dataset that keeps them in the open, without asking it for an item."""
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and indices is not None:
        labels = labels_of(inner)
        return labels[torch.as_tensor(indices)] if labels is not None else None
    tensors = getattr(dataset, "tensors", None)
    held = [tensors[-1]] if isinstance(tensors, tuple) and tensors else [vars(dataset).get(k) for k in LABELS] if hasattr(dataset, "__dict__") else []
    for found in held:
        if found is None or callable(found):
            continue
        try:
            labels = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError):
            continue
        if labels.dim() == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dim() == 1 and labels.numel() and on_cpu(labels) and labels.numel() <= 2_000_000 and not labels.is_complex():
            if labels.is_floating_point() and not bool(scalar((labels == labels.round()).all())):
                continue
            return labels.detach().long()
    return None


def sampler_figures(loader: Any) -> dict[str, Any]:
    """What a sampler with weights draws from: how many weights, how many rows, and the mean weight of each class."""
    sampler, dataset = loader.sampler, loader.dataset
    weights = getattr(sampler, "weights", None)
    if weights is None or not isinstance(weights, torch.Tensor | list) or not hasattr(dataset, "__len__"):
        return {}
    weights = torch.as_tensor(weights).detach().double().flatten()
    if not on_cpu(weights) or weights.numel() == 0:
        return {}
    found: dict[str, Any] = {"n": weights.numel(), "num_samples": getattr(sampler, "num_samples", None), "replacement": getattr(sampler, "replacement", None),
                             "distinct": min(int(weights[:10000].unique().numel()), 10000), "zeros": int(scalar((weights == 0).sum()))}
    labels = labels_of(dataset)
    if labels is not None and labels.numel() == weights.numel() and scalar(labels.min()) >= 0 and scalar(labels.max()) < CLASSES:
        counts = torch.bincount(labels)
        sums = torch.bincount(labels, weights=weights)
        found["class_counts"] = integers(counts)
        means = sums / counts.clamp(min=1)
        found["class_weights"] = numbers(means)
        found["class_spread"] = scalar(((weights - means[labels]).abs() / means[labels].clamp(min=1e-30)).mean())
    elif labels is not None and scalar(labels.min()) >= 0 and scalar(labels.max()) < CLASSES:
        found["class_counts"] = integers(torch.bincount(labels))
    return {"sampler_weights": found}
