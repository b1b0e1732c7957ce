"""Questions about classes: how often each label was seen, with what weight it enters the loss, which of them are predicted."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules import script
from osler.rules.code_questions import covers, enclosing


@dataclass(frozen=True, slots=True)
class Shares:
    """Labels counted at a criterion over the sampled calls; ``late`` are the newest ones: [labels, predicted, hits] by class."""

    counts: np.ndarray
    late: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def share(self) -> np.ndarray:
        return np.asarray(self.counts / max(self.total, 1))


def shares(fact: Fact) -> Shares | None:
    counts = fact.get("label_counts")
    if not isinstance(counts, list) or len(counts) < 2 or sum(counts) == 0:
        return None
    late: dict[str, Any] = fact.get("late") or {}
    columns = [np.asarray(late.get(k) or (), dtype=float) for k in ("labels", "predicted", "hits")]
    whole = all(len(c) == len(counts) for c in columns)
    return Shares(np.asarray(counts, dtype=float), (columns[0], columns[1], columns[2]) if whole else None)


def backwards(weights: np.ndarray, counts: np.ndarray, skew: float, ratio: float) -> tuple[int, int] | None:
    """``(common, rare)`` class where the common class is weighted up against the rare one, although it is ``skew`` times as frequent.

    Only where weights grow with frequency on the whole (their logarithms correlate positively).
    """
    seen = (counts >= 5) & (weights > 1e-6 * weights.max(initial=0.0))  # a weight of zero leaves a class out on purpose
    if seen.sum() < 2 or (weights[seen] < 0).any():
        return None
    w, n = np.log(np.maximum(weights[seen], 1e-9)), np.log(counts[seen])
    if np.ptp(n) < np.log(skew) or np.ptp(w) < np.log(ratio):
        return None
    index = np.flatnonzero(seen)
    common, rare = int(index[np.argmax(counts[seen])]), int(index[np.argmin(counts[seen])])
    if weights[common] < ratio * weights[rare] or float(np.corrcoef(w, n)[0, 1]) < 0.5:
        return None
    return common, rare


def shuffled(weights: np.ndarray, counts: np.ndarray, skew: float, close: float = 0.35) -> tuple[int, int] | None:
    """``(class, other)``: the weights are those of an inverse frequency, handed to the wrong classes."""
    if len(counts) < 3 or (counts < 10).any() or (weights <= 0).any() or counts.max() < skew * counts.min():
        return None
    ideal = np.log(1 / counts)
    own = np.log(weights)
    ideal, own = ideal - ideal.mean(), own - own.mean()
    gap = np.abs(np.sort(ideal) - np.sort(own)).max()
    if gap > close * np.ptp(ideal) or np.abs(ideal - own).max() < 3 * max(gap, 0.15) or np.abs(ideal - own).max() < 0.9:
        return None
    if float(np.corrcoef(ideal, own)[0, 1]) > 0.6:
        return None
    over, under = int(np.argmax(own - ideal)), int(np.argmin(own - ideal))
    return over, under


CONVERSIONS = frozenset(("tensor", "as_tensor", "FloatTensor", "float", "to", "cuda", "cpu", "double", "from_numpy", "astype", "asarray", "array", "clone", "detach"))


def argument_line(window: Window, at: Location | None, keywords: tuple[str, ...], callee: tuple[str, ...] = ()) -> Location | None:
    """Where the value of an argument was computed: the statement that binds the name given for one of ``keywords`` in a call at ``at``
    (for ``callee``, also as its first argument), through plain conversions and the user's own functions."""
    module = script.tree(window, at.file) if at is not None else None
    if module is None or at is None:
        return at
    for call in script.calls(module):
        if not call.lineno <= at.line <= (call.end_lineno or call.lineno) or (callee and script.call_name(call) not in callee):
            continue
        given = next((k.value for k in call.keywords if k.arg in keywords), call.args[0] if callee and call.args else None)
        if given is not None:
            return _computed(window, Location(at.file, call.lineno), given, Location(at.file, given.lineno))
    return at


def _computed(window: Window, at: Location, node: ast.expr, here: Location, depth: int = 5) -> Location:
    while isinstance(node, ast.Call) and script.call_name(node) in CONVERSIONS:
        inner = node.args[0] if node.args and not (isinstance(node.func, ast.Attribute) and script.call_name(node) in ("to", "astype")) \
            else node.func.value if isinstance(node.func, ast.Attribute) else None
        if inner is None or isinstance(inner, ast.List | ast.Tuple | ast.Constant):
            return here
        node = inner
    if isinstance(node, ast.Call):
        function = script.function_named(window, at.file, script.call_name(node))
        returned = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None] if function is not None else []
        return _computed(window, Location(at.file, returned[-1].lineno), returned[-1].value, Location(at.file, returned[-1].lineno), depth - 1) \
            if returned and depth and returned[-1].value is not None else here
    name = script.dotted(node)
    found = script.origin(window, at, name) if name and depth else None
    value = getattr(found, "value", None)
    if found is None or not isinstance(value, ast.expr):
        return Location(at.file, found.lineno) if found is not None else here
    return _computed(window, Location(at.file, found.lineno), value, Location(at.file, found.lineno), depth - 1)


LABEL_NAMES = frozenset(("t", "y", "yy", "target", "targets", "label", "labels", "yb", "ytr", "y_train", "train_y", "y_true", "true", "gt"))


def _class_of(node: ast.expr) -> int | None:
    """The class whose rows ``(y == 1).float()`` or 0/1 labels ``y`` pick out."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and isinstance(node.comparators[0], ast.Constant):
        value = node.comparators[0].value
        return int(value) if isinstance(value, int | float) else None
    return 1 if (script.dotted(node) or "").rsplit(".", 1)[-1] in LABEL_NAMES else None


def number(window: Window, file: str, node: ast.AST | None, given: dict[str, float], before: int) -> float | None:
    """Value of an elementwise expression once some names are given; ``None`` where a part is unknown."""
    if node is None:
        return None
    name = script.dotted(node)
    if name is not None and name in given:
        return given[name]
    if isinstance(node, ast.BinOp):
        a, b = number(window, file, node.left, given, before), number(window, file, node.right, given, before)
        if a is None or b is None:
            return None
        kind = type(node.op)
        return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}.get(kind, (a / b if b else None) if kind is ast.Div else None)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        a, b = number(window, file, node.left, given, before), number(window, file, node.comparators[0], given, before)
        if a is None or b is None:
            return None
        return float({ast.Eq: a == b, ast.NotEq: a != b, ast.Gt: a > b, ast.GtE: a >= b, ast.Lt: a < b, ast.LtE: a <= b}.get(type(node.ops[0]), False))
    if isinstance(node, ast.Call):
        if script.call_name(node) == "where" and len(node.args) == 3:
            test = number(window, file, node.args[0], given, before)
            return None if test is None else number(window, file, node.args[1 if test else 2], given, before)
        if isinstance(node.func, ast.Attribute) and script.call_name(node) in ("mean", "sum"):
            return given.get(f"share:{_class_of(node.func.value)}")
        if isinstance(node.func, ast.Attribute) and script.call_name(node) in ("item", "float", "bool", "long", "double", "to", "detach", "squeeze", "view", "reshape", "type_as"):
            return number(window, file, node.func.value, given, before)
        if script.call_name(node) in ("full_like", "ones_like") and node.args:
            return number(window, file, node.args[1], given, before) if len(node.args) > 1 else 1.0
    if isinstance(node, ast.Subscript) and script.dotted(node.slice) in given:
        held = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
        index = int(given[script.dotted(node.slice) or ""])
        return number(window, file, held.elts[index], given, before) if isinstance(held, ast.List | ast.Tuple) and len(held.elts) > index else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = number(window, file, node.operand, given, before)
        return -value if value is not None else None
    if name is not None:
        found = script.assignment(window, file, name, before)
        if isinstance(found, ast.Assign) and len(found.targets) == 1 and not isinstance(found.targets[0], ast.Tuple) and found.lineno < before:
            return number(window, file, found.value, given, found.lineno)
    value = script.constant(window, file, node, before)
    return float(value) if isinstance(value, int | float) else None


def factor_line(window: Window, at: Location | None) -> Location | None:
    """The line near the row losses where their factor gets its value: indexed by the labels, or chosen by ``where``."""
    if at is None:
        return None
    scope = next(enclosing(window, at, (ast.FunctionDef,)), None) or script.tree(window, at.file)
    near = [n for n in ast.walk(scope) if abs(getattr(n, "lineno", 10**6) - at.line) < 30] if scope is not None else []
    for node in near:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):
            name = script.dotted(node.value)
            found = script.assignment(window, at.file, name, node.lineno) if name and weighs(name) else None
            if found is not None:
                return Location(at.file, found.lineno)
    for node in near:
        if isinstance(node, ast.Assign) and not covers(node, at.line) and any(weighs(w) for w in script.words(node)):
            held = [n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) or (isinstance(n, ast.Call) and script.call_name(n) in ("where", "gather", "index_select", "take"))]
            if held:
                return Location(at.file, node.lineno)
    return at


def weighs(name: str) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    return "weight" in last or "alpha" in last or last in ("w", "cw", "ws", "at")
