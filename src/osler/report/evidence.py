"""Which figure shows the evidence of a finding: a curve, bars over layers, or a value against its threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from osler.core.finding import Evidence, Finding
from osler.core.window import Window

CURVES = {"loss": ("train_loss", "validation_loss"), "value": ("train_loss", "validation_loss"),
          "train_loss": ("train_loss",), "validation_loss": ("validation_loss",), "grad_norm": ("grad_norm",), "lr": ("lr",),
          "accuracy": ("train_accuracy", "validation_accuracy"), "step_time": ("step_time",),
          "data_wait": ("data_wait", "step_time")}
LAYER_COLUMNS = frozenset(("grad_norm", "weight_norm", "update_norm", "zero_share", "descent"))
BARS = 16


def chart(finding: Finding, window: Window, curves: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first of these that the data can carry: layer bars, a curve, a gauge. ``None`` where the code line says it all."""
    for item in finding.evidence:
        parts = (item.signal or "").replace(".", "/").split("/")
        if parts[0] == "layers" and parts[-1] in LAYER_COLUMNS:
            bars = layers(parts[-1], finding, window)
            if bars:
                return {**bars, "threshold": item.threshold, "caption": item.text}
    for item in finding.evidence:
        column = (item.signal or "").replace(".", "/").split("/")[-1]
        names = [n for n in CURVES.get(column, ()) if n in curves and curves[n]["count"] > 1]
        if names:
            return {"kind": "curve", "series": names, "span": [finding.first_step, finding.last_step],
                    "threshold": item.threshold if len(names) == 1 else None, "caption": item.text}
    return next((g for g in map(gauge, finding.evidence) if g), None) if finding.certainty != "certain" else None


def layers(column: str, finding: Finding, window: Window) -> dict[str, Any] | None:
    """Median over the finding's steps, one bar per parameter, in the order of the network."""
    rows, facts = window.layers, window.last("params")
    if len(rows) == 0 or facts is None:
        return None
    if finding.first_step is not None:
        rows = rows[rows["step"] >= finding.first_step]
    if finding.last_step is not None:
        rows = rows[rows["step"] <= finding.last_step]
    bars: list[dict[str, Any]] = []
    for parameter in facts.get("params", ()):
        values = rows[column][rows["param"] == parameter.get("uid")]
        values = values[np.isfinite(values)]
        if len(values):
            name = str(parameter.get("name"))
            bars.append({"name": name, "value": float(np.median(values)), "mark": name == finding.where.parameter})
    if len(bars) < 2:
        return None
    if len(bars) > BARS:
        picks = sorted({round(i * (len(bars) - 1) / (BARS - 1)) for i in range(BARS)} | {i for i, b in enumerate(bars) if b["mark"]})
        bars = [bars[i] for i in picks]
    positive = [b["value"] for b in bars if b["value"] > 0]
    wide = bool(positive) and max(positive) / min(positive) > 30 and all(b["value"] >= 0 for b in bars)
    return {"kind": "bars", "bars": bars, "log": wide, "signal": f"layers/{column}"}


def gauge(item: Evidence) -> dict[str, Any] | None:
    """A value beside the threshold it crossed; a threshold of zero is no measure of anything."""
    value, threshold = item.value, item.threshold
    if value is None or threshold is None or not math.isfinite(value) or not math.isfinite(threshold) or threshold <= 0 or value < 0:
        return None
    return {"kind": "gauge", "value": value, "threshold": threshold, "caption": item.text}
