"""The facts ``nonfinite`` of a run, sorted out: which of them lost it, and which figures speak for themselves."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.trace import VIEWS, Op, Trace
from osler.core.window import Window
from osler.rules.graph_questions import passes
from osler.rules.script import place as script_place

FORWARD = ("loss", "output")
SPREAD = ("loss", "gradient", "parameter", "output")
QUOTIENTS = frozenset(("div", "div_", "true_divide", "rsqrt", "reciprocal"))
SPREADS = frozenset(("std", "var", "std_mean", "var_mean"))
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
    if overflowed_half(fact) or (overflowed(fact) and not any(seen)):
        return False
    before = window.steps[window.steps["step"] <= fact.step]
    return not bool(np.isinf(before["grad_norm"]).any() or np.nanmax(np.abs(before["loss"]), initial=0.0) > 1e12)


def overflowed(fact: Fact) -> bool:
    """The finite values beside the others reach the end of the float32 range: they grew there, no table holds such numbers."""
    o = operand(fact)
    return bool(o.get("nonfinite")) and max(abs(number(o.get("min")) or 0.0), abs(number(o.get("max")) or 0.0)) > 1e30


def overflowed_half(fact: Fact) -> bool:
    """The operand is float16, holds infinities and no NaN, and its other values reach the end of that range."""
    o = operand(fact)
    size = max(abs(number(o.get("min")) or 0.0), abs(number(o.get("max")) or 0.0))
    return o.get("dtype") == "float16" and bool(o.get("nonfinite")) and not o.get("nan") and size > 1e4


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
    """A quotient or logarithm on the way from finite values (the batch that the model was given, or figures of the script's own) to the
    first operation of the graph that met a NaN: it made it, and left no trace on the graph because no gradient passes there."""
    batch, o = fact.get("batch"), operand(fact)
    if fact.get("op_kind") != "input" or fact.get("before_step") is False or not o.get("nonfinite") or (isinstance(batch, dict) and batch.get("nonfinite") != 0) \
            or spoiled_data(window):
        return None
    shape = tuple(o.get("shape") or ())
    alone = not isinstance(batch, dict)
    if alone and o.get("numel") != 1:
        return None
    for trace in window.traces:
        for op in trace.ops:
            if op.outs and trace.tensors[op.outs[0]].requires_grad:
                for tid in op.ins:
                    if alike(trace.tensors[tid].shape, shape) and not trace.tensors[tid].requires_grad and trace.tensors[tid].uid < 0 \
                            and (made := risky_source(trace, tid, op.index, alone)) is not None:
                        return made
    return None


def spoiled_data(window: Window) -> bool:
    """Some training batch that was looked at held values that are not finite."""
    return any((f.get("nonfinite") or 0) and f.get("phase") in (0, "train") for f in window.facts("input"))


def spread_of_one(trace: Trace, quotient: Op) -> Op | None:
    """The standard deviation (or variance) that a quotient divides by."""
    if len(quotient.ins) < 2:
        return None
    op = trace.producer(quotient.ins[1], quotient.index)
    while op is not None and op.name in ("add", "clamp", "clamp_min", "sqrt", "maximum", *VIEWS) and op.ins:
        op = trace.producer(op.ins[0], op.index)
    return op if op is not None and op.name in SPREADS else None


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """The same shape but for the number of rows: the last batch may be shorter."""
    return len(one) == len(other) and one[1:] == other[1:]


def risky_source(trace: Trace, tid: int, before: int, alone: bool, depth: int = 12) -> Op | None:
    """The last quotient or logarithm of a computed tensor among the operations that made ``tid`` without a gradient. With ``alone``, where
    nothing tells that the values before were finite, only the spread of a single value."""
    todo, seen = [(tid, before, 0)], set()
    while todo:
        here, stop, far = todo.pop(0)
        op = trace.producer(here, stop)
        if op is None or op.index in seen or far > depth:
            continue
        seen.add(op.index)
        if op.name in QUOTIENTS and (spread := spread_of_one(trace, op)) is not None:
            return spread
        if alone:
            todo += [(t, op.index, far + 1) for t in op.ins]
            continue
        if op.name in LOGARITHMS or (op.name in QUOTIENTS and (len(op.ins) > 1 or op.name in ("rsqrt", "reciprocal"))):
            return op
        todo += [(t, op.index, far + 1) for t in op.ins]
    return None


SUSPECTS = ("Acos", "Asin", "Atanh", "Sqrt", "Log", "Log2", "Log10", "Rsqrt", "Reciprocal", "Pow", "Div")
"""Operations that can spoil weights in one step, likeliest first. Norms, cdist and std are none: torch gives them derivative 0 at 0."""


def unseen(window: Window) -> tuple[str, Location | None, Fact] | None:
    """The likeliest culprit where the moment itself was not watched: weights that were fine at one look and NaN at the next, or a gradient
    that is not finite for no operand seen, while the loss was finite and did not grow. (operation, line, fact)"""
    found = facts(window)
    if not found or spoiled_data(window):
        return None
    fact = found[0]
    poisoned = fact.get("what") in (*FORWARD, "parameter") and (fact.get("op_kind") == "parameter" or fact.get("before_step") is False)
    blank = fact.get("what") == "gradient" and fact.get("op_kind") in (None, "unknown")
    norms = window.steps["grad_norm"].astype(float)
    norms = norms[np.isfinite(norms)]
    if not (poisoned or blank) or growing(fact, window) is not None or (len(norms) > 3 and norms.max() > 1e4 * max(float(np.median(norms)), 1e-12)):
        return None
    known = list(dict.fromkeys((str(row.get("op")), script_place(row.get("at"))) for row in fact.get("candidates") or ()))
    rows = [(name, at) for op, at in known if (name := re.sub(r"Backward\d*$", "", op)) in SUSPECTS and (name != "Div" or computed_divisor(window, at))]
    rows.sort(key=lambda row: SUSPECTS.index(row[0]))
    if not rows or sum(name == rows[0][0] for name, _ in rows) > 1:
        return None
    return rows[0][0], rows[0][1], fact


def suspected(cause: str, late: tuple[str, Location | None, Fact], window: Window, fix: str) -> Finding:
    """The finding on a culprit of ``unseen``."""
    op, at, fact = late
    losses = [x for x in map(number, fact.get("recent_losses") or ()) if x is not None and math.isfinite(x)]
    return Finding(
        cause, "suspected", severity(window), f"Weights became NaN between two looks, with a finite loss: {op} is the operation that can do it", fix,
        Where.at(at or fact.at), first_step=fact.step, last_step=fact.step,
        evidence=(Evidence(f"step {fact.step}: {fact.get('what')} is {fact.get('value', 'non-finite')}"
                           + (f", the losses before were {', '.join(f'{x:.3g}' for x in losses[-3:])}" if losses else "")
                           + f"; {op} lies on the graph of the loss (run with --locate to see its operand)", "nonfinite", samples=1),))


def computed_divisor(window: Window, at: Location | None) -> bool:
    """Whether the quotient of this line is a division by a value that learns."""
    return any(op.at == at and len(op.ins) > 1 and trace.tensors[op.ins[1]].requires_grad for trace in window.traces for op in trace.named("div", "div_", "true_divide"))


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
