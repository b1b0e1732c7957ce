"""How a run ended, against a prediction that looks at nothing: the mean of the targets, or the shares of the classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from osler.core.facts import Fact
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import Curve, curve
from osler.rules.graph_questions import criteria
from osler.rules.scales import pairs, score


@dataclass(frozen=True)
class Outcome:
    """``ratio``: late loss over that of a blind prediction (``None`` where that is not known); ``first`` likewise for the first loss;
    ``lost``: a loss or gradient became non-finite for no fault of the data."""

    ratio: float | None
    first: float | None
    lost: bool
    line: Curve | None

    def failed(self, unlearned: float) -> bool:
        """Nothing was learned, as far as can be told."""
        if self.lost:
            return True
        if self.ratio is not None:
            return self.ratio > unlearned
        return self.line is not None and self.line.one_sign and self.line.fall < 1 - unlearned

    def told(self) -> str:
        if self.lost:
            return "the loss was lost to a non-finite value"
        if self.ratio is not None:
            return f"the loss ends at {self.ratio:.3g} times that of a blind guess"
        return f"the loss went from {self.line.start:.4g} to {self.line.late:.4g}" if self.line is not None else "the loss was not seen"


def outcome(window: Window) -> Outcome:
    line = curve(window)
    bad = nonfinite.first(window, "loss", "gradient", "parameter")
    lost = bad is not None and not nonfinite.from_data(window, bad)
    main = max(criteria(window), key=lambda f: int(f.get("calls") or 0), default=None)
    if main is not None:
        guess = blind(window, main)
        rows = window.calls
        rows = rows[(rows["criterion"] == main.get("index", -1)) & np.isfinite(rows["value"])]
        if guess and len(rows) >= 5:
            late = float(np.median(rows["value"][-max(3, len(rows) // 10):]))
            return Outcome(late / guess, float(rows["value"][0]) / guess, lost, line)
    for pair in pairs(window):
        found = score(window, pair)
        if found is not None and found.constant > 0:
            return Outcome(found.ratio, line.first / found.constant if line is not None else None, lost, line)
    return Outcome(None, None, lost, line)


def blind(window: Window, fact: Fact) -> float | None:
    """Loss of predicting the shares of the classes, for a plain mean of cross entropy."""
    if fact.get("reduction") != "mean" or fact.get("weight") or fact.get("pos_weight"):
        return None
    function, shape = str(fact.get("function")), (fact.get("input") or {}).get("shape") or []
    if function in ("cross_entropy", "nll_loss") and len(shape) >= 2 and shape[1] > 1:
        entropy = window.stream("batches")["label_entropy"]
        entropy = entropy[np.isfinite(entropy)]
        classes = max(2, min(int(fact.get("target_classes") or shape[1]), int(shape[1])))
        return max(float(np.median(entropy)), 0.1) if len(entropy) else math.log(classes)
    mean = fact.get("target_mean")
    if function in ("binary_cross_entropy", "binary_cross_entropy_with_logits") and isinstance(mean, float) and 0 < mean < 1 and fact.get("target_integers", 0) > 0.99:
        return -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    return None
