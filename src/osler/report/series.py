"""Curves for the views: every series cut into at most a few hundred buckets of min, mean and max, so no extreme is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.window import Window

BUCKETS = 600
TRAIN, VALIDATION = 0, 1


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    label: str
    unit: str
    log: bool = False


SPECS = {s.name: s for s in (
    Spec("train_loss", "training loss", "loss", log=True),
    Spec("validation_loss", "validation loss", "loss", log=True),
    Spec("train_accuracy", "training accuracy", "1"),
    Spec("validation_accuracy", "validation accuracy", "1"),
    Spec("lr", "learning rate", "1/step", log=True),
    Spec("grad_norm", "gradient norm", "loss/weight", log=True),
    Spec("step_time", "step time", "s", log=True),
    Spec("data_wait", "time waiting for data", "s"),
)}


def all_series(window: Window) -> dict[str, dict[str, Any]]:
    """Name to series, for everything that was recorded at least once."""
    steps = window.steps
    found = {"train_loss": training_loss(window), "validation_loss": criterion(window, VALIDATION, "value"),
             "train_accuracy": criterion(window, TRAIN, "accuracy"),
             "validation_accuracy": criterion(window, VALIDATION, "accuracy")}
    for name in ("lr", "grad_norm", "step_time", "data_wait"):
        found[name] = (steps["step"], steps[name])
    lost = min((f.step for f in window.facts("nonfinite")), default=None)
    packed = {name: pack(SPECS[name], x, y, lost_from=lost if name == "train_loss" else None) for name, (x, y) in found.items()}
    return {name: series for name, series in packed.items() if series["count"]}


def training_loss(window: Window) -> tuple[np.ndarray, np.ndarray]:
    """What backward started from; the criterion's own values where that was not seen."""
    steps = window.steps
    if len(steps) and np.isfinite(steps["loss"]).any():
        return steps["step"], steps["loss"]
    return criterion(window, TRAIN, "value")


def criterion(window: Window, phase: int, column: str) -> tuple[np.ndarray, np.ndarray]:
    """One value per step: calls at the same step are averaged, weighted by their rows."""
    calls = window.calls
    calls = calls[(calls["phase"] == phase) & ~np.isnan(calls[column])]
    if len(calls) == 0:
        return np.empty(0, np.int64), np.empty(0)
    steps, group = np.unique(calls["step"], return_inverse=True)
    rows = np.maximum(calls["batch"], 1).astype(float)
    with np.errstate(invalid="ignore", over="ignore"):
        return steps, np.bincount(group, rows * calls[column]) / np.bincount(group, rows)


def pack(spec: Spec, x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS, lost_from: int | None = None) -> dict[str, Any]:
    """Min, mean and max per bucket of equally many points; infinities are counted apart, NaN means not measured.

    ``lost_from`` is the step at which a non-finite loss was seen: from there on NaN is a measurement too.
    """
    y = np.asarray(y, dtype=float)
    finite = np.isfinite(y)
    broken = np.isinf(y)
    if lost_from is not None:
        broken |= np.isnan(y) & (np.asarray(x) > lost_from)
    kept_x, kept_y = np.asarray(x)[finite], y[finite]
    parts = np.array_split(np.arange(len(kept_y)), min(len(kept_y), buckets)) if len(kept_y) else []
    lost = np.asarray(x)[broken]
    return {"name": spec.name, "label": spec.label, "unit": spec.unit, "log": spec.log, "count": len(kept_y),
            "x": [int(kept_x[p[0]]) for p in parts], "end": [int(kept_x[p[-1]]) for p in parts],
            "min": rounded(kept_y[p].min() for p in parts), "mean": rounded(kept_y[p].mean() for p in parts),
            "max": rounded(kept_y[p].max() for p in parts),
            "first": number(kept_y[0]) if len(kept_y) else None, "last": number(kept_y[-1]) if len(kept_y) else None,
            "nonfinite": {"count": len(lost), "for_good": bool(len(lost)) and not (finite & (np.asarray(x) > lost[0])).any(),
                          "first_step": int(lost[0]) if len(lost) else None,
                          "last_step": int(lost[-1]) if len(lost) else None}}


def number(value: float) -> float:
    """Five figures, which is more than a pixel can show."""
    return float(f"{float(value):.5g}")


def rounded(values: Iterable[float]) -> list[float]:
    return [number(v) for v in values]
