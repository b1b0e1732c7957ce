"""Predictions set against data, and what a constant would have scored: questions of size and range that several rules ask.

A prediction meets its target in a criterion of torch or in a difference written by hand; both are a ``Pair`` here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.trace import VIEWS, Op, Trace
from osler.core.window import Window
from osler.rules.curve import curve
from osler.rules.graph_questions import criteria, criterion_op, origin, passes

REGRESSION = frozenset(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
CHOOSES = VIEWS | {"gather", "take_along_dim", "masked_select", "take"}
WEIGHTED = frozenset(("linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "addmm", "bmm", "einsum", "embedding", "lstm", "gru", "batch_norm", "layer_norm"))
INFINITE = math.inf
RANGE: dict[str, tuple[float, float]] = {
    "sigmoid": (0, 1), "hardsigmoid": (0, 1), "softmax": (0, 1), "tanh": (-1, 1), "softsign": (-1, 1), "relu": (0, INFINITE), "relu_": (0, INFINITE),
    "relu6": (0, 6), "softplus": (0, INFINITE), "exp": (0, INFINITE), "abs": (0, INFINITE), "square": (0, INFINITE), "elu": (-1, INFINITE),
    "celu": (-1, INFINITE), "gelu": (-0.17, INFINITE), "silu": (-0.28, INFINITE), "logsigmoid": (-INFINITE, 0), "log_softmax": (-INFINITE, 0),
    "lstm": (-1, 1), "gru": (-1, 1), "rnn_tanh": (-1, 1), "rnn_relu": (0, INFINITE), "cosine_similarity": (-1, 1), "normalize": (-1, 1),
    "sin": (-1, 1), "cos": (-1, 1)}
"""What an operation can put out at all."""


def reach(op: Op) -> tuple[float, float] | None:
    """The values an operation can put out, ``None`` where it sets no bound."""
    if op.name in ("clamp", "clip", "clamp_"):
        low, high = op.kw.get("min"), op.kw.get("max")
    elif op.name in ("clamp_min", "clamp_max"):
        given = next((v for v in op.kw.values() if isinstance(v, int | float)), None)
        low, high = (given, None) if op.name == "clamp_min" else (None, given)
    elif op.name == "hardtanh":
        low, high = op.kw.get("min_val", -1), op.kw.get("max_val", 1)
    else:
        return RANGE.get(op.name)
    if not isinstance(low, int | float) and not isinstance(high, int | float):
        return None
    return (float(low) if isinstance(low, int | float) else -INFINITE, float(high) if isinstance(high, int | float) else INFINITE)


@dataclass(frozen=True)
class Pair:
    """A prediction and the data it is compared with.

    Attributes:
        function: the criterion, or ``difference`` for one written by hand.
        at: the line of the comparison.
        fact: the criterion fact, if there is one.
        trace, op, tid: where the program compares them, and the prediction there.
        prediction: figures of the first predictions; late: of the newest, where they were looked at.
        target: ``mean``, ``std``, ``min``, ``max`` and shares of the targets.
    """

    function: str
    at: Location | None
    fact: Fact | None
    trace: Trace | None
    op: Op | None
    tid: int
    prediction: dict[str, Any]
    late: dict[str, Any] | None
    target: dict[str, Any]

    @property
    def size(self) -> float:
        """Root mean square of the targets."""
        return math.hypot(float(self.target["mean"]), float(self.target["std"]))

    def maker(self) -> Op | None:
        """The operation that made the prediction's values."""
        if self.trace is None or self.op is None:
            return None
        made, _ = origin(self.trace, self.tid, self.op.index, CHOOSES)
        if made is not None and made.name in ("cat", "stack"):  # outputs of several steps side by side
            parts = [origin(self.trace, t, made.index, CHOOSES)[0] for t in made.ins]
            first = parts[0] if parts else None
            return first if first is not None and all(p is not None and p.name == first.name for p in parts) else made
        return made

    def outside(self, low: float, high: float) -> float:
        """Share of the targets beyond a range; counted at 0, 1 and -1, else what a normal distribution of their figures would give."""
        known = {(0.0, "low"): "below_zero", (-1.0, "low"): "below_minus_one", (1.0, "high"): "above_one"}
        total = 0.0
        for bound, side in ((low, "low"), (high, "high")):
            distance = bound - self.target["min"] if side == "low" else self.target["max"] - bound
            if math.isinf(bound) or distance <= 1e-3 * max(1.0, abs(bound)):
                continue
            share = self.target.get(known.get((bound, side), ""))
            if share is None:
                z = (bound - self.target["mean"]) / max(self.target["std"], 1e-12) * (1 if side == "high" else -1)
                share = 0.5 * math.erfc(z / math.sqrt(2))
            total += float(share)
        return total

    def excess(self, low: float, high: float) -> float:
        """How far the farthest target lies beyond the range."""
        return float(max(low - self.target["min"], self.target["max"] - high, 0.0))


def pairs(window: Window) -> Iterator[Pair]:
    """Training comparisons with data that is known: criterion calls first, then differences by hand."""
    for fact in criteria(window):
        if fact.get("target_mean") is None or fact.get("prediction_first") is None or (fact.get("target") or {}).get("requires_grad"):
            continue
        target = {"mean": fact["target_mean"], "std": fact["target_std"], "min": fact["target_min"], "max": fact["target_max"],
                  **{k: fact.get(f"target_{k}") for k in ("below_zero", "above_one", "below_minus_one")}}
        call = criterion_op(window, fact)
        trace, op = call if call is not None else (None, None)
        yield Pair(str(fact.get("function")), fact.at, fact, trace, op, op.ins[0] if op is not None else -1,
                   fact["prediction_first"], fact.get("prediction_last"), target)
    yield from by_hand(window)


def by_hand(window: Window) -> Iterator[Pair]:
    """Differences whose outcome reaches the loss without meeting weights again."""
    seen: set[tuple[str, int]] = set()
    for run in passes(window):
        tensors = run.trace.tensors
        for op in run.operations:
            found = op.values.get("residual")
            if not found or found.get("log") or op.at is None or (op.at.file, op.at.line) in seen:
                continue
            if "log_prob" in window.line(op.at.file, op.at.line):  # a density of what was sampled is no target
                continue
            after = [run.trace.ops[i] for i in run.trace.forward(op.outs) if i in run.needed and i < run.backward.index]
            if any(o.name in WEIGHTED or any(tensors[t].uid >= 0 for t in o.ins) for o in after):
                continue
            made = [t for t in op.ins if tensors[t].requires_grad]
            if not made:
                continue
            seen.add((op.at.file, op.at.line))
            yield Pair("difference", op.at, None, run.trace, op, made[0], found["prediction"], None, found["target"])


@dataclass(frozen=True)
class Score:
    """Late loss against the loss of a constant: ``ratio`` 1 means nothing was learned. ``calls`` values were looked at."""

    late: float
    constant: float
    calls: int

    @property
    def ratio(self) -> float:
        return self.late / self.constant


def constant_loss(function: str, deviation: float) -> float:
    """Loss of predicting the mean of targets with this deviation (taken as normal)."""
    error = np.abs(deviation * np.array([0.063, 0.189, 0.319, 0.454, 0.598, 0.755, 0.935, 1.150, 1.440, 1.960]))
    if function in ("mse_loss", "square"):
        return deviation * deviation
    if function in ("l1_loss", "absolute"):
        return float(error.mean())
    if function == "root":
        return deviation
    return float(np.where(error < 1, 0.5 * error**2, error - 0.5).mean())


def score(window: Window, pair: Pair) -> Score | None:
    """Of a regression; ``None`` where its loss was not seen or is no plain mean."""
    deviation = float((pair.fact.get("target_std_within") if pair.fact is not None else None) or pair.target["std"])
    if deviation <= 0:
        return None
    if pair.fact is not None:
        if pair.function not in REGRESSION or pair.fact.get("weight"):
            return None
        rows = window.calls
        rows = rows[(rows["criterion"] == pair.fact.get("index", -1)) & np.isfinite(rows["value"])]
        if len(rows) < 5:
            return None
        shape = (pair.fact.get("input") or {}).get("shape") or [1]
        scale = float(np.prod(shape)) if pair.fact.get("reduction") == "sum" else 1.0
        late = float(np.median(rows["value"][-max(3, len(rows) // 10):])) / scale
        return Score(late, constant_loss(pair.function, deviation), len(rows)) if pair.fact.get("reduction") in ("mean", "sum") else None
    line = curve(window)
    kind = written_loss(pair, line.first) if line is not None and pair.function == "difference" else None
    return Score(line.late, constant_loss(kind, deviation), line.n) if line is not None and kind is not None else None


def written_loss(pair: Pair, first: float, within: float = 1.6) -> str | None:
    """Which mean of the differences the first loss is: of squares, of absolute values, or the root of the former."""
    p, y = pair.prediction, pair.target
    square = (p["mean"] - y["mean"]) ** 2 + p["std"] ** 2 + y["std"] ** 2
    shift = abs(p["mean"] - y["mean"])
    guesses = {"square": square, "absolute": max(0.8 * math.sqrt(square), shift), "root": math.sqrt(square)}
    fits = {k: abs(math.log(first / v)) for k, v in guesses.items() if v > 0 and first > 0}
    best = min(fits, key=lambda k: fits[k], default=None)
    return best if best is not None and fits[best] < math.log(within) else None
