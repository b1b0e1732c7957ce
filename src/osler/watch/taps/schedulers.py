"""Learning-rate schedulers: construction, and when, from where and with what they are stepped."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from osler.core.facts import Location
from osler.watch.compiler import passing, quiet
from osler.watch.readout import NAN, scalar
from osler.watch.session import Session
from osler.watch.where import construction_line, is_user, library_line, shorten, user_line, user_location

FIELDS = ("T_max", "eta_min", "total_steps", "step_size", "gamma", "mode", "patience", "factor", "threshold", "threshold_mode", "total_iters", "milestones",
          "_milestones", "T_0", "T_mult", "base_lrs", "max_lrs", "cooldown", "min_lrs", "start_factor", "end_factor", "power", "total_size", "step_ratio")
MARKS = 256
LINES = 6


class Schedule:
    """What one scheduler went through."""

    def __init__(self, number: int, instance: Any, at: Location | None, row: dict[str, Any]) -> None:
        self.number, self.ref, self.at, self.row = number, weakref.ref(instance), at, row
        self.calls = 0
        self.early = 0
        self.busy = False
        self.stride = 1
        self.marks: list[list[float]] = []
        self.lines: dict[str, list[Any]] = {}
        self.lib: str | None = None
        self.attrs: dict[str, Any] = {}
        self.lr: list[float] = []
        self.first: list[float] = []
        self.drives: list[int] = []


class Schedules:
    """All schedulers of the process; facts are written at growing counts and at the end."""

    def __init__(self, session: Session, training: Any) -> None:
        self.session, self.training = session, training
        self.known: dict[int, Schedule] = {}
        self.every: list[Schedule] = []
        self.depth = 0
        session.finishers.append(self.finish)

    @quiet
    def constructed(self, instance: Any) -> None:
        optimizer = getattr(instance, "optimizer", None)
        if len(self.every) >= 200 or optimizer is None:
            return
        at = construction_line(instance)
        loop = self.training.by_id.get(id(optimizer))
        inner = [self.known[id(s)].number for s in parts(instance) if id(s) in self.known]
        row: dict[str, Any] = {"number": len(self.every), "class": type(instance).__name__, "optimizer": loop.index if loop is not None else None, "inner": inner,
               "up": [p.to_json() for p in user_location(4)[1]], "numbers": {}, "function": None, "metric": hasattr(instance, "num_bad_epochs"), "custom": _custom(instance)}
        for function in getattr(instance, "lr_lambdas", None) or ():
            row["numbers"].update(numbers_of(function))
            row["function"] = row["function"] or where_defined(function)
        entry = Schedule(len(self.every), instance, at, row)
        entry.first = rates(optimizer)
        self.known[id(instance)] = entry
        self.every.append(entry)
        self.write(entry, instance)

    @quiet
    def stepped(self, entry: Schedule, instance: Any, given: Any) -> None:
        """After a call of ``step`` that the user's code (or a framework) made."""
        session, number = self.session, entry.calls
        optimizer = instance.optimizer
        loop = self.training.by_id.get(id(optimizer))
        if loop is not None and not loop.steps and not session.fast:
            entry.early += 1
        if number == 32:
            entry.busy = session.step - (entry.marks[0][0] if entry.marks else 0) <= 3 * 32
        if number <= 64 or number % 64 == 0:
            at = user_line()
            key = str(at)
            if key not in entry.lines and len(entry.lines) < LINES:
                entry.lines[key] = [at, 0]
                entry.lib = entry.lib or library_line()
            if key in entry.lines:
                entry.lines[key][1] += 1
        if number % entry.stride == 0:
            lr = rates(optimizer)
            entry.marks.append([session.step, lr[0] if lr else NAN, _value(given)])
            if len(entry.marks) >= MARKS:
                entry.marks, entry.stride = entry.marks[1::2], entry.stride * 2
        if number in (1, 2, 4, 8, 16, 32, 128, 512) or number % 4096 == 0:
            self.look(entry, instance)
            if number in (32, 512) or number % 4096 == 0:
                self.write(entry, instance)

    def look(self, entry: Schedule, instance: Any) -> None:
        """What is read off the object: fields, rates, and the optimizers whose groups it sets."""
        optimizer = instance.optimizer
        entry.attrs, entry.lr = fields(instance), rates(optimizer)
        groups = {id(g) for g in optimizer.param_groups}
        drives = []
        for loop in self.training.live():
            other = loop.ref()
            if other is not None and any(id(g) in groups for g in other.param_groups):
                drives.append(loop.index)
        entry.drives = drives

    def write(self, entry: Schedule, instance: Any) -> None:
        if instance is not None:
            self.look(entry, instance)
        lines = sorted(entry.lines.values(), key=lambda row: -row[1])
        self.session.fact("scheduler", entry.at, **entry.row, steps=entry.calls, attrs=entry.attrs, lr_first=entry.first, lr_last=entry.lr,
                          early=entry.early, drives=entry.drives, marks=entry.marks, lib_step=entry.lib,
                          step_at=lines[0][0].to_json() if lines and lines[0][0] is not None else None,
                          lines=[[at.to_json() if at is not None else None, count] for at, count in lines])

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        for entry in self.every:
            self.write(entry, entry.ref())


def parts(instance: Any) -> Iterable[Any]:
    """Schedulers that another one steps for the user: by torch's own composites, or held by a class of the user's."""
    for value in list(vars(instance).values()):
        if isinstance(value, LRScheduler):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, LRScheduler))


def rates(optimizer: Any) -> list[float]:
    """Learning rates of the first groups."""
    return [_value(g.get("lr")) for g in optimizer.param_groups[:4]]


def _value(raw: Any) -> float:
    if isinstance(raw, bool) or raw is None:
        return NAN
    if isinstance(raw, torch.Tensor):
        return scalar(raw)
    if isinstance(raw, int | float):
        return float(raw)
    return float(raw) if type(raw).__module__ == "numpy" and getattr(raw, "ndim", 1) == 0 else NAN


def fields(instance: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FIELDS:
        value = vars(instance).get(name)
        if isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, list | tuple) and len(value) < 20 and all(isinstance(v, int | float) for v in value):
            found[name] = list(value)
        elif name == "milestones" and hasattr(value, "elements"):
            found[name] = sorted(k for k in value if isinstance(k, int))[:20]
    return found


def numbers_of(function: Any) -> dict[str, float]:
    """Numbers that a rate function holds on to (bound arguments, enclosing and global names it reads), by name. It is not called."""
    found: dict[str, float] = {}

    def take(name: str, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and len(found) < 16:
            found.setdefault(name, value)

    if isinstance(function, functools.partial):
        code = getattr(function.func, "__code__", None)
        for name, value in (*zip(code.co_varnames if code is not None else (), function.args, strict=False), *function.keywords.items()):
            take(name, value)
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        for name, value in vars(function).items() if hasattr(function, "__dict__") else ():
            take(name, value)
        return found
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            take(name, cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    defaults = function.__defaults__ or ()
    for name, value in zip(code.co_varnames[code.co_argcount - len(defaults):code.co_argcount], defaults, strict=False):
        take(name, value)
    for name in code.co_names:
        take(name, function.__globals__.get(name))
    return found


def where_defined(function: Any) -> list[Any] | None:
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None) or getattr(vars(type(function)).get("__call__"), "__code__", None)
    if code is None or not is_user(code):
        return None
    return [shorten(code.co_filename), code.co_firstlineno, code.co_name]


def _custom(instance: Any) -> bool:
    """The user's own class decides when to step."""
    code = getattr(inspect.unwrap(type(instance).step), "__code__", None)
    return code is not None and is_user(code)


def wrap(session: Session, schedules: Schedules, original: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` of a scheduler class. Calls that one scheduler makes of another are not counted."""
    guard, known = session.guard, schedules.known

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        entry = known.get(id(self))
        if entry is None:
            return original(self, *args, **kwargs)
        if session.fast and entry.busy:
            entry.calls += 1
            return original(self, *args, **kwargs)
        schedules.depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            schedules.depth -= 1
        if schedules.depth == 0 and guard.armed("scheduler"):
            start = perf_counter()
            try:
                if entry.ref() is self:
                    entry.calls += 1
                    schedules.stepped(entry, self, args[0] if args else kwargs.get("metrics", kwargs.get("epoch")))
            except Exception:
                guard.failed("scheduler")
            session.own += perf_counter() - start
        return result

    passed: Callable[..., Any] = passing(step)
    return passed


def install(session: Session, schedules: Schedules) -> None:
    from osler.watch.taps.tools import after

    for cls in list(vars(lr_scheduler).values()):
        if isinstance(cls, type) and issubclass(cls, LRScheduler):
            if cls.__name__ in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler"):
                ours = after(session, "scheduler", cls.__dict__["__init__"], lambda _, args, __: schedules.constructed(args[0]))
                setattr(cls, "__init__", ours)
            if "step" in cls.__dict__:
                setattr(cls, "step", wrap(session, schedules, cls.__dict__["step"]))
