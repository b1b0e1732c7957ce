"""The line that makes the rate what it is: of a scheduler, of its rate function, or of a schedule written by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.curve import optimizer
from osler.rules.schedule_lengths import step_place
from osler.rules.schedules import (
    Rhythm,
    Schedule,
    cadence,
    length_argument,
    rate_lines,
    step_line,
)
from osler.rules.script import (
    around,
    assignment,
    call_name,
    calls,
    function_around,
    function_named,
    loop_heads,
    place,
    tree,
)
from osler.rules.values import argument, decided


def culprit(window: Window, active: Sequence[Schedule], pace: Rhythm | None) -> tuple[Location | None, str, tuple[Location | None, ...]]:
    """The line that makes the rate what it is: of a scheduler, or of a schedule written by hand."""
    if active:
        s = active[-1]
        value, at = length_argument(window, s)
        how = cadence(s, pace)
        if how in ("step", "micro") and _meant_per_epoch(window, s, pace):
            where, interval = step_place(window, s)
            return where, interval or "Call scheduler.step() once per epoch, after the loop over batches.", (s.at,)
        inner = formula(window, s)
        where = inner if inner is not None else decided(window, at, value) if at is not None and value is not None else s.at
        if where is not None and s.at is not None and where != s.at and s.kind not in ("LambdaLR", "MultiplicativeLR") and value is None:
            where = s.at
        return where, "Give the schedule the length of the whole run, in the unit in which step() is called.", (s.at, s.step_at)
    lines = rate_lines(window)
    if lines:
        where = hand_written(window, *lines[-1])
        where = _called_per_batch(window, where) or where
        return where, "Check the formula of the rate: its unit (epochs or steps), whole-number division, and what it is multiplied with.", tuple(a for a, _ in lines)
    made = optimizer(window)
    return made.at if made is not None else None, "Find what writes the learning rate of this optimizer.", ()


def _meant_per_epoch(window: Window, s: Schedule, pace: Rhythm | None) -> bool:
    epochs, per_epoch = (pace.epochs, s.steps / pace.epochs) if pace is not None and pace.epochs else (0, 0.0)
    gamma = s.attrs.get("gamma")
    if epochs < 2 or per_epoch < 2:
        return False
    if s.kind == "ExponentialLR":
        return isinstance(gamma, int | float) and gamma >= 0.5 and gamma ** epochs > 1e-3
    if s.kind == "StepLR":
        size = float(s.attrs.get("step_size") or 0)
        return size <= max(epochs, 50) and float(gamma or 0.1) ** (epochs // max(size, 1)) > 1e-4
    if s.kind == "MultiStepLR":
        return bool(max(s.attrs.get("milestones") or [0]) <= max(epochs, 100))
    if s.kind in ("LambdaLR", "MultiplicativeLR"):
        code = _lambda(window, s)
        return code is not None and any(re.fullmatch(r"epoch|ep|e|epochs|current_epoch", a.arg) for a in code.args.args)
    return False


def _lambda(window: Window, s: Schedule) -> ast.Lambda | ast.FunctionDef | None:
    at = place(s.fact.get("function"))
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None:
        return None
    found = [n for n in ast.walk(module) if isinstance(n, ast.Lambda | ast.FunctionDef) and n.lineno <= at.line <= (n.end_lineno or n.lineno)
             and (isinstance(n, ast.Lambda) or n.name == at.function)]
    return max(found, key=lambda n: n.lineno, default=None)


def formula(window: Window, s: Schedule) -> Location | None:
    """The line inside a rate function that decides: one with whole-number division, else its last ``return``."""
    code = _lambda(window, s)
    at = place(s.fact.get("function"))
    if code is None or at is None:
        return None
    floor = divided(code)
    if floor is not None:
        return Location(at.file, floor, at.function)
    if length_argument(window, s)[0] is not None:
        return None
    if isinstance(code, ast.Lambda):
        return Location(at.file, code.lineno, at.function)
    last = [n.lineno for n in ast.walk(code) if isinstance(n, ast.Return)]
    return Location(at.file, max(last), at.function) if last else None


def divided(node: ast.AST) -> int | None:
    """A whole-number division of step by length that gives a factor (not a count of periods in an exponent)."""
    powers = {id(m) for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) for m in ast.walk(n.right)}
    return next((n.lineno for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.FloorDiv) and id(n) not in powers), None)


def hand_written(window: Window, at: Location, statement: ast.Assign | ast.AugAssign) -> Location:
    """The formula behind ``group["lr"] = …``: the line itself, the name it is given, or the function that computes it."""
    value = statement.value
    if divided(value) is not None or isinstance(statement, ast.AugAssign):
        return at
    for _ in range(4):
        if isinstance(value, ast.Name):
            function = function_around(around(window, at))
            arguments = [a.arg for a in function.args.args] if function is not None else []
            if function is not None and value.id in arguments:
                given = next(((c, argument(c, value.id, arguments.index(value.id) - (arguments[0] == "self"))) for c in calls(tree(window, at.file), function.name)), None)
                if given is None or given[1] is None:
                    return at
                at, value = Location(at.file, given[0].lineno), given[1]
                continue
            found = assignment(window, at.file, value.id, at.line)
            inner = getattr(found, "value", None)
            if not isinstance(found, ast.Assign | ast.AnnAssign | ast.AugAssign) or not isinstance(inner, ast.expr):
                return at
            at, value = Location(at.file, found.lineno), inner
            if divided(value) is not None:
                return at
            continue
        if isinstance(value, ast.Call):
            function = function_named(window, at.file, call_name(value))
            if function is not None:
                floor = divided(function)
                last = [n.lineno for n in ast.walk(function) if isinstance(n, ast.Return)]
                return Location(at.file, floor or (max(last) if last else function.lineno))
        return at
    return at


def _called_per_batch(window: Window, at: Location) -> Location | None:
    """A function of the epoch is called for every batch, with something else than the epoch."""
    function = function_around(around(window, at))
    step = step_line(window)
    names = [a.arg for a in function.args.args] if function is not None else []
    index = next((i for i, n in enumerate(names) if re.fullmatch(r"epoch|ep|epochs|current_epoch|epoch_idx", n)), None)
    if function is None or index is None or step is None or step.file != at.file:
        return None
    inner = loop_heads(window, step)[-1:]
    for call in calls(tree(window, at.file), function.name):
        given = argument(call, names[index], index - (names[0] == "self"))
        if given is not None and inner and inner == loop_heads(window, Location(at.file, call.lineno))[-1:] and not (
                isinstance(given, ast.Name) and re.search("epoch|^ep$", given.id)):
            return Location(at.file, call.lineno)
    return None
