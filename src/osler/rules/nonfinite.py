"""The facts ``nonfinite`` of a run, sorted out: which of them lost it, and which figures speak for themselves."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence
from osler.core.trace import Op, Trace
from osler.core.window import Window
from osler.rules.graph_questions import passes

FORWARD = ("loss", "output")
SPREAD = ("loss", "gradient", "parameter", "output")
QUOTIENTS = frozenset(("div", "div_", "true_divide", "rsqrt", "reciprocal"))
LOGARITHMS = frozenset(("log", "log2", "log10", "log1p", "log_"))


def facts(window: Window) -> list[Fact]:
    """In time order, without gradients that a GradScaler found and skipped (they are its daily work)."""
    scaled = bool(window.facts("scaler"))
    return [f for f in window.facts("nonfinite") if not (scaled and f.get("what") == "gradient")]


def first(window: Window, *whats: str) -> Fact | None:
    return next((f for f in facts(window) if f.get("what") in whats), None)


def lost(window: Window) -> bool:
    """Whether the weights are gone or the loss stayed non-finite to the end."""
    if any(f.get("what") == "parameter" for f in facts(window)):
        return True
    loss = window.steps["loss"]
    return bool(len(loss) and not np.isfinite(loss[-max(3, len(loss) // 10):]).any() and first(window, *SPREAD))


def severity(window: Window) -> str:
    return "fatal" if lost(window) else "harmful"


def number(raw: Any) -> float | None:
    """A figure of an operand; infinities may come as text."""
    try:
        return float(raw)
    except (TypeError, ValueError):
        return None


def operand(fact: Fact) -> dict[str, Any]:
    raw = fact.get("operand")
    return raw if isinstance(raw, dict) else {}


def describe(fact: Fact) -> str:
    """Operand and place as text."""
    o = operand(fact)
    parts = []
    if o.get("zeros"):
        parts.append(f"{o['zeros']} of {o.get('numel', 'its')} elements are exactly 0")
    if o.get("negative"):
        parts.append(f"{o['negative']} are negative")
    low, high = number(o.get("min")), number(o.get("max"))
    if low is not None and high is not None:
        parts.append(f"range {low:.3g} to {high:.3g}")
    if not fact.get("op"):
        return "which operation made it was not seen"
    text = str(fact.get("op")).removesuffix("Backward0")
    return text + (f": its operand has shape {tuple(o.get('shape') or ())}, " + ", ".join(parts) if parts else "")


def evidence(fact: Fact) -> Evidence:
    o = operand(fact)
    value = number(o.get("zeros") if o.get("zeros") is not None else o.get("min"))
    return Evidence(f"step {fact.step}: {fact.get('what')} is {fact.get('value', 'non-finite')}; {describe(fact)}", "nonfinite", value, 0.0,
                    int(number(o.get("numel")) or 1))


def sure(fact: Fact) -> str:
    """``certain`` when the operand itself proves it."""
    o = operand(fact)
    return "certain" if o.get("zeros") or o.get("negative") or o.get("nonfinite") else "measured"


def from_data(window: Window, fact: Fact) -> bool:
    """Whether what entered the model was non-finite, and did not overflow on its way: weights and gradients were sane before, and the
    batch of that step, where it was looked at, is not clean."""
    if fact.get("before_step") is False or not (fact.get("what") == "input" or fact.get("op_kind") == "input") or on_the_way(window, fact) is not None:
        return False
    seen = [f.get("nonfinite") for f in window.facts("input") if f.step == fact.step and f.get("phase") in (0, "train")]
    batch = fact.get("batch")
    seen += [batch.get("nonfinite")] if isinstance(batch, dict) else []
    if seen and all(n == 0 for n in seen) and not operand(fact).get("nan"):
        return False
    before = window.steps[window.steps["step"] <= fact.step]
    return not bool(np.isinf(before["grad_norm"]).any() or np.nanmax(np.abs(before["loss"]), initial=0.0) > 1e12)


def place(window: Window, fact: Fact) -> Location | None:
    """Where the operation lies. What went wrong in the very first backward carries the line of that backward only: the recorded program
    then knows the operation, if one of its kind took an operand of that shape and led to the loss."""
    name = re.sub(r"Backward\d*$", "", str(fact.get("op") or "")).lower()
    shape = tuple(operand(fact).get("shape") or ())
    if fact.get("line_by") or not name:
        return fact.at
    found = {str(op.at): op.at for run in passes(window) for op in run.operations
             if op.name.replace("_", "") == name and op.at is not None and any(run.trace.tensors[t].shape == shape for t in (*op.ins, *op.outs))}
    return next(iter(found.values())) if len(found) == 1 else fact.at


def on_the_way(window: Window, fact: Fact) -> Op | None:
    """A quotient or logarithm between the batch that the model was given, which was finite, and the first operation of the graph that
    met a NaN: it made it, and left no trace on the graph because no gradient passes there."""
    batch, o = fact.get("batch"), operand(fact)
    if fact.get("op_kind") != "input" or fact.get("before_step") is False or not o.get("nonfinite") or not isinstance(batch, dict) or batch.get("nonfinite") != 0:
        return None
    shape = tuple(o.get("shape") or ())
    for trace in window.traces:
        for op in trace.ops:
            if op.outs and trace.tensors[op.outs[0]].requires_grad:
                for tid in op.ins:
                    if alike(trace.tensors[tid].shape, shape) and not trace.tensors[tid].requires_grad and trace.tensors[tid].uid < 0 \
                            and (made := risky_source(trace, tid, op.index)) is not None:
                        return made
    return None


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """The same shape but for the number of rows: the last batch may be shorter."""
    return len(one) == len(other) and one[1:] == other[1:]


def risky_source(trace: Trace, tid: int, before: int, depth: int = 12) -> Op | None:
    """The last quotient or logarithm of a computed tensor among the operations that made ``tid`` without a gradient."""
    todo, seen = [(tid, before, 0)], set()
    while todo:
        here, stop, far = todo.pop(0)
        op = trace.producer(here, stop)
        if op is None or op.index in seen or far > depth:
            continue
        seen.add(op.index)
        if op.name in LOGARITHMS or (op.name in QUOTIENTS and (len(op.ins) > 1 or op.name in ("rsqrt", "reciprocal"))):
            return op
        todo += [(t, op.index, far + 1) for t in op.ins]
    return None


def growing(fact: Fact | None, window: Window, factor: float = 10.0) -> float | None:
    """How far the finite loss rose before it was lost, relative to its start; ``None`` if it did not reach ``factor``."""
    recent = [x for x in map(number, (fact.get("recent_losses") or []) if fact is not None else []) if x is not None and math.isfinite(x)]
    loss = window.steps["loss"].astype(float)
    seen = [*loss[np.isfinite(loss)].tolist(), *recent]
    if len(seen) < 2:
        return None
    start = abs(seen[0])
    top = max(abs(x) for x in seen[1:])
    return top / start if start > 0 and top > factor * start else None
