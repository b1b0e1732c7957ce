from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.curve import in_turn, loaded
from osler.rules.graph_questions import passes
from osler.rules.outcome import Outcome, outcome
from osler.rules.preparation import input_line


@rule("input-scale", "signal")
def check(window: Window, *, large: float = 25.0, flat: float = 0.02, unlearned: float = 0.9, half: float = 0.5, wild: float = 5.0) -> Iterator[Finding]:
    """The inputs are far from unit scale.

    **What it is.** Raw features go into the first weights as they are: columns in thousands beside columns in units, pixels from 0 to 255, dates in
    seconds; or they were normalised twice and hardly differ any more.

    **How it is seen.** At the first operation that multiplies data with trainable weights (so a normalisation or division inside the model counts):
    a root mean square of a column, or of all values, above `large`; or values within `flat` of zero or of their own mean. Harmful where the run shows it: the
    loss ends above `unlearned` of that of a blind guess, or is lost, or ends above `half` of it after a start `wild` times worse. Where it learns, this is a note.

    **Why it matters.** Large inputs saturate the first layer and blow up its gradients, and the largest column drowns the others; inputs without
    contrast give no gradient that tells samples apart.

    **What to do.** Standardise each column with the figures of the training rows (StandardScaler), divide pixels by 255, or begin with a BatchNorm.

    **When this is wrong.** Integer ids for embeddings, inputs that meet a normalisation first and loaded models are left out.

    **Source.** LeCun et al., "Efficient BackProp" (1998); handbook A §19 (standardised inputs).
    """
    if window.n_steps < 2 or loaded(window):
        return
    worst: tuple[float, Raw] | None = None
    for raw in first_weights(window):
        found = raw.problem(large, flat)
        if found and (worst is None or found > worst[0]):
            worst = (found, raw)
    if worst is None:
        return
    raw = worst[1]
    end = outcome(window)
    failed = end.failed(unlearned) and not (in_turn(window) and not end.lost)
    slow = end.ratio is not None and end.first is not None and end.ratio > half and end.first > wild and not in_turn(window)
    quiet = raw.peak <= large  # without contrast: only worth a word where nothing is learned
    if quiet and not failed:
        return
    yield say(window, raw, end, failed or slow, large, flat)


@dataclass(frozen=True)
class Raw:
    """Data at the first weights: figures over all values, and over columns where rows have them."""

    op: Op
    figures: dict[str, Any]

    @property
    def columns(self) -> np.ndarray:
        return np.asarray((self.figures.get("columns") or {}).get("rms") or [self.size], dtype=float)

    @property
    def size(self) -> float:
        return math.hypot(float(self.figures["mean"]), float(self.figures["std"]))

    @property
    def peak(self) -> float:
        return max(float(self.columns.max()), self.size)

    def contrast(self) -> float:
        """Largest deviation of a column over its size; of all values where there are no columns."""
        std = np.asarray((self.figures.get("columns") or {}).get("std") or [self.figures["std"]], dtype=float)
        return float((std / np.maximum(self.columns, 1e-12)).max()) if len(std) == len(self.columns) else 1.0

    def problem(self, large: float, flat: float) -> float:
        """Larger is worse; 0 is none."""
        if not all(math.isfinite(float(self.figures[k])) for k in ("mean", "std", "min", "max")):
            return 0.0
        if self.peak > large:
            return self.peak
        top = max(abs(float(self.figures["min"])), abs(float(self.figures["max"])))
        if 0 < top < flat or (top > 0 and self.contrast() < flat):
            return 1.0
        return 0.0


def first_weights(window: Window) -> Iterator[Raw]:
    seen: set[int] = set()
    for run in passes(window):
        for op in run.operations:
            uids = {run.trace.tensors[t].uid for t in op.ins if run.trace.tensors[t].requires_grad}
            if "raw" in op.values and not uids & seen:
                seen |= {u for u in uids if u >= 0}
                yield Raw(op, op.values["raw"])


def origin_line(window: Window, raw: Raw) -> Location | None:
    facts = [f for f in window.facts("input") if f.get("phase") == "train" and f.at is not None]
    same = [f for f in facts if f.get("shape") == raw.figures.get("shape")] or facts
    at = same[0].at if same else raw.op.lines[-1] if raw.op.lines else None
    return input_line(window, at) or at or raw.op.at


def say(window: Window, raw: Raw, end: Outcome, harmful: bool, large: float, flat: float) -> Finding:
    at = origin_line(window, raw)
    big = raw.peak > large
    columns = raw.columns
    uneven = big and len(columns) > 1 and columns.max() > 30 * np.median(columns)
    if uneven:
        what = f"Input columns differ in size: column {int(columns.argmax())} has {columns.max():.3g}, the median one {np.median(columns):.3g}"
    elif big:
        what = f"Inputs are far from unit scale: {raw.figures['min']:.4g} to {raw.figures['max']:.4g}"
    else:
        what = f"Inputs hardly differ: mean {raw.figures['mean']:.3g}, deviation {raw.figures['std']:.2g}"
    start = f"; the first one was {end.first:.3g} times it" if end.first is not None and end.first > 2 else ""
    return Finding(
        "input-scale", "measured", "harmful" if harmful else "note", what,
        f"Standardise the inputs made at {quoted(window, at, 'this line')} with figures of the training rows (pixels: divide by 255)."
        if big else f"Look at the normalisation of {quoted(window, at, 'the inputs')}: applied twice, or with figures of another scale.",
        Where.at(at, also=(str(raw.op.at),) if raw.op.at is not None and raw.op.at != at else ()), first_step=0, last_step=window.n_steps,
        evidence=(Evidence(f"what meets the first weights has root mean square {raw.size:.3g}, its largest column {raw.peak:.3g}", "trace/raw", raw.peak if big else raw.contrast(),
                           large if big else flat, 1),
                  Evidence(f"{end.told()}{start}", "calls/value", end.ratio, None)),
        treatment="normalise-inputs", explains=("loss-plateau", "loss-diverged", "dead-units") if harmful else ())
