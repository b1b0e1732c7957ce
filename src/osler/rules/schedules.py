"""What is known of learning-rate schedules: schedulers, how often they are stepped, the rates used, epochs and steps of the run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.loaders import TRAIN, loaders, roles
from osler.rules.script import LOOPS, around, call_name, calls, constant, function_around, place, tree, words
from osler.rules.values import argument, call_at, expanded

BATCHES = re.compile(r"iter|batch|update|(total|num|max|n|train|training|all|optim\w*|optimizer|warmup|decay)_?steps|steps_per|^t_total$|^steps$", re.I)
EPOCHS = re.compile(r"epoch|^ep$|^eps$|^n_ep", re.I)
LENGTH = re.compile(r"(total|max|num|n|train|training|all|t)_?(training_|train_|optim\w*_)?(steps?|iters?|iterations|updates|epochs?|total|max|batches)$|^total$|^horizon$|^length$|^decay_(steps|iters)$", re.I)
WARM = re.compile(r"warm|ramp", re.I)
HORIZON = {"CosineAnnealingLR": ("T_max", 1), "OneCycleLR": ("total_steps", 2), "StepLR": ("step_size", 1), "MultiStepLR": ("milestones", 1), "LinearLR": ("total_iters", 3),
           "ConstantLR": ("total_iters", 2), "PolynomialLR": ("total_iters", 1), "CosineAnnealingWarmRestarts": ("T_0", 1), "SequentialLR": ("milestones", 2)}


@dataclass(frozen=True, slots=True)
class Schedule:
    """One scheduler the user's code steps (not the parts of a composite).

    Attributes:
        marks: [calls, (optimizer steps before the call, rate after it, value given)].
        calls: calls of its ``step`` after construction; early: those before the first step of its optimizer.
        steps: optimizer steps of the optimizers whose groups it sets.
    """

    fact: Fact
    kind: str
    at: Location | None
    calls: int
    early: int
    marks: npt.NDArray[np.float64]
    step_at: Location | None
    attrs: dict[str, Any]
    numbers: dict[str, float]
    drives: tuple[int, ...]
    steps: int

    @property
    def base(self) -> float:
        """The rate its optimizer was given."""
        lrs = self.attrs.get("base_lrs") or self.fact.get("lr_first") or [float("nan")]
        return float(lrs[0]) if isinstance(lrs[0], int | float) else float("nan")

    @property
    def framework(self) -> bool:
        return bool(self.fact.get("lib_step"))


def schedules(window: Window) -> list[Schedule]:
    newest: dict[Any, Fact] = {}
    for f in window.facts("scheduler"):
        newest[f.get("number", str(f.at))] = f
    inner = {n for f in newest.values() for n in f.get("inner") or ()}
    return [_schedule(window, f) for n, f in newest.items() if n not in inner and "marks" in f.data]


def parts(window: Window, schedule: Schedule) -> list[Schedule]:
    """The schedulers inside a composite one."""
    wanted = schedule.fact.get("inner") or ()
    newest = {f.get("number"): f for f in window.facts("scheduler")}
    return [_schedule(window, newest[n]) for n in wanted if n in newest]


def _schedule(window: Window, f: Fact) -> Schedule:
    marks = np.array([[np.nan if v is None else v for v in row] for row in f.get("marks") or ()], float).reshape(-1, 3)
    own = f.get("optimizer")
    drives = tuple(f.get("drives") or ([own] if isinstance(own, int) else ()))
    taken = steps_taken(window)
    lines = [place(row[0]) for row in f.get("lines") or ()]
    attrs = dict(f.get("attrs") or {})
    if "_milestones" in attrs:
        attrs["milestones"] = attrs["_milestones"]
    return Schedule(f, str(f.get("class")), f.at, int(f.get("steps") or 0), int(f.get("early") or 0), marks, lines[0] if lines else place(f.get("step_at")), attrs,
                    dict(f.get("numbers") or {}), drives, sum(taken.get(i, 0) for i in drives))


def steps_taken(window: Window) -> dict[int, int]:
    """Steps of each optimizer."""
    newest = window.last("cycle")
    rows = newest.get("optimizers") if newest is not None else None
    found = {int(r["index"]): int(r.get("steps") or 0) for r in rows or () if isinstance(r, dict) and isinstance(r.get("index"), int)}
    for index, count in zip(*np.unique(window.steps["optimizer"], return_counts=True), strict=True):
        found[int(index)] = max(found.get(int(index), 0), int(count))
    return found


def backwards_taken(window: Window, drives: tuple[int, ...]) -> int:
    """Backward passes that went into the steps of these optimizers, projected from the watched ones."""
    rows = window.steps[np.isin(window.steps["optimizer"], drives)] if drives else window.steps
    taken = sum(steps_taken(window).get(i, 0) for i in drives)
    seen = rows["backwards"][rows["backwards"] > 0]
    return round(float(np.median(seen)) * taken) if len(seen) else taken


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Epochs of the run, and batches served in each."""

    epochs: int
    batches: int


def rhythm(window: Window) -> Rhythm | None:
    """From the training loader's passes, else from the loops around the optimizer's step."""
    kinds = roles(window)
    best: tuple[int, int] | None = None
    for index, fact in loaders(window).items():
        if kinds.get(index) != TRAIN:
            continue
        passes = [f for f in window.facts("loader-pass") if f.get("loader") == index and f.get("batches")]
        rows = window.stream("batches")
        rows = rows[rows["loader"] == index]
        count = max([int(f["pass_"]) for f in passes] + ([int(rows["pass_"].max())] if len(rows) else [0]))
        size = int(np.median([f["batches"] for f in passes])) if passes else int(fact.get("length") or 0)
        if count and size and (best is None or count * size > best[0] * best[1]):
            best = (count, size)
    if best is not None:
        return Rhythm(*best)
    steps = sum(steps_taken(window).values())
    loops = epoch_loops(window)
    return Rhythm(loops, max(1, steps // loops)) if loops and steps else None


def step_line(window: Window) -> Location | None:
    """Line of the newest optimizer's step."""
    newest = window.last("cycle")
    for row in reversed((newest.get("optimizers") if newest is not None else None) or ()):
        at = place((row.get("last_lines") or {}).get("step"))
        if at is not None and row.get("steps"):
            return at
    return None


def epoch_loops(window: Window) -> int | None:
    """Turns of the loop over epochs: ``for epoch in range(N)`` with N known from the text."""
    found = []
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if isinstance(n, ast.For) and isinstance(n.iter, ast.Call) and call_name(n.iter) in ("range", "trange") and n.iter.args \
                    and isinstance(n.target, ast.Name) and (EPOCHS.search(n.target.id) or n.target.id in ("e", "_")):
                last = n.iter.args[1] if len(n.iter.args) > 1 else n.iter.args[0]
                value = constant(window, file, last, n.lineno)
                if isinstance(value, int) and any(isinstance(m, (*LOOPS, ast.Call)) for s in n.body for m in ast.walk(s)):
                    found.append((bool(EPOCHS.search(n.target.id)), value))
    return max(found)[1] if found else None


def rates(window: Window, drives: tuple[int, ...] = ()) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Steps and the rate used in them (newest optimizer by default): as watched, and as schedulers left it for the next step."""
    rows = window.steps
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0)
    wanted = drives or (int(rows["optimizer"][-1]),)
    rows = rows[np.isin(rows["optimizer"], wanted)]
    last = int(rows["step"][-1]) if len(rows) else 0
    seen = rows[np.isfinite(rows["lr"])]
    known = {int(step): float(lr) for step, lr in zip(seen["step"], seen["lr"], strict=True)}
    if len(seen) < len(rows) and len(wanted) == 1:
        for f in {f.get("number"): f for f in window.facts("scheduler")}.values():
            if wanted[0] in (f.get("drives") or ()) and not f.get("inner"):
                for step, lr, _ in f.get("marks") or ():
                    if isinstance(lr, int | float) and step + 1 <= last:
                        known.setdefault(int(step) + 1, float(lr))
    at = sorted(known)
    return np.array(at, np.int64), np.array([known[i] for i in at], float)


def cadence(schedule: Schedule, pace: Rhythm | None) -> str:
    """``step``, ``epoch``, or ``other`` (``micro``: per backward pass of an accumulated step)."""
    if schedule.steps < 4 or not schedule.calls:
        return "other"
    share = schedule.calls / schedule.steps
    if share > 1.5:
        return "micro"
    if share >= 0.6 and not (pace is not None and pace.epochs >= 2 and schedule.calls <= pace.epochs + 1):
        return "step"
    if pace is not None and schedule.calls <= 1.2 * pace.epochs + 1:
        return "epoch"
    gaps = np.diff(schedule.marks[:, 0])
    return "epoch" if len(gaps) >= 2 and np.median(gaps) >= 3 and share < 0.4 else "other"


def construction(window: Window, schedule: Schedule) -> ast.Call | None:
    return call_at(window, schedule.at, schedule.kind) or call_at(window, schedule.at)


def length_argument(window: Window, schedule: Schedule) -> tuple[ast.expr | None, Location | None]:
    """The expression that sets the schedule's length, and the line of the call it is in (a caller of the user's own factory)."""
    call = construction(window, schedule)
    at = schedule.at
    name, position = HORIZON.get(schedule.kind, ("", None))
    value = argument(call, name, position) if name else None
    if schedule.kind == "OneCycleLR" and value is None and call is not None:
        value = argument(call, "steps_per_epoch", 4) or argument(call, "epochs", 3)
    if value is None and call is not None and schedule.kind in ("LambdaLR", "MultiplicativeLR"):
        for up in (schedule.at, *map(place, schedule.fact.get("up") or ())):
            for c in calls(_statement(window, up)):
                named = next((k.value for k in c.keywords if k.arg and LENGTH.search(k.arg)), None)
                if named is not None:
                    return named, up
        named_length = next((k for k in schedule.numbers if LENGTH.search(k) and not WARM.search(k)), None)
        if named_length is not None:
            return ast.copy_location(ast.Name(named_length, ast.Load()), call), at
    return value, at


def _statement(window: Window, at: Location | None) -> ast.stmt | None:
    found = around(window, at)
    return found[-1] if found else None


def horizon(schedule: Schedule) -> float | None:
    """Calls that the schedule is planned for (a period, for repeating ones)."""
    name, _ = HORIZON.get(schedule.kind, ("", None))
    value = schedule.attrs.get(name)
    if isinstance(value, list):
        value = max(value, default=None)
    if isinstance(value, int | float) and value > 0:
        return float(value)
    named = [v for k, v in schedule.numbers.items() if LENGTH.search(k) and not WARM.search(k) and v > 1]
    return float(max(named)) if named else None


def warmup(schedule: Schedule) -> float | None:
    """Calls that the warm-up is planned for."""
    if schedule.kind == "LinearLR" and (schedule.attrs.get("start_factor") or 1) < 1:
        return float(schedule.attrs.get("total_iters") or 0) or None
    named = [v for k, v in schedule.numbers.items() if WARM.search(k) and v > 1]
    return float(max(named)) if named else None


def unit(window: Window, at: Location | None, value: ast.expr | None) -> str | None:
    """Whether a length is written in batches or in epochs, as far as its names tell."""
    if value is None or at is None:
        return None
    nodes = expanded(window, at, value)
    names = {w for n in nodes for w in ([n.id] if isinstance(n, ast.Name) else [n.attr] if isinstance(n, ast.Attribute) else [])}
    if any(isinstance(n, ast.Call) and call_name(n) == "len" for n in nodes) or any(BATCHES.search(n) for n in names):
        return "batch"
    return "epoch" if any(EPOCHS.search(n) for n in names) else None


def rate_lines(window: Window) -> list[tuple[Location, ast.Assign | ast.AugAssign]]:
    """Statements that write ``group["lr"]``."""
    found = []
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if not isinstance(n, ast.Assign | ast.AugAssign):
                continue
            targets = n.targets if isinstance(n, ast.Assign) else [n.target]
            if any(isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == "lr" for t in targets):
                found.append((Location(file, n.lineno), n))
    return sorted(found, key=lambda row: (row[0].file, row[0].line))


def mentions(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(w) for w in words(node))


def function_of(window: Window, at: Location | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    return function_around(around(window, at))
