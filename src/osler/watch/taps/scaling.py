"""Loss scaling: what each GradScaler was asked to do, in which order relative to the optimizer steps, and how its scale went.

Aggregated by the line that constructs the scaler, since one that is built anew every epoch is one thing to change. Nothing here
synchronises a device: the scale is read where it lies on the CPU, and a skipped step is one during which the optimizer did not step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from osler.core.facts import Location
from osler.watch.compiler import passing, quiet
from osler.watch.observe import Observer
from osler.watch.readout import scalar
from osler.watch.session import Session
from osler.watch.where import construction_line, user_line

MAX_LINES = 20
MAX_HISTORY = 64
IN_A_ROW = 2
"""Skipped steps in a row after which the next cycle is recorded, to see which operation overflows."""
MAX_RECORDED = 3


class Scaling:
    """Counters of every construction line; see the module docstring."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.rows: dict[str, dict[str, Any]] = {}
        self.of: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        self.seen: dict[int, int] = {}
        self.born: dict[int, Location | None] = {}
        self.recording = False
        session.finishers.append(self.finish)

    def row(self, scaler: Any) -> dict[str, Any]:
        known = self.of.get(id(scaler))
        if known is not None and known[0]() is scaler:
            return known[1]
        return self._enter(scaler, self.born.pop(id(scaler), None) or user_line())

    def _enter(self, scaler: Any, at: Location | None) -> dict[str, Any]:
        key = str(at) if len(self.rows) < MAX_LINES else next(iter(self.rows))
        row = self.rows.setdefault(key, {
            "at": at, "instances": 0, "enabled": bool(scaler.is_enabled()), "init_scale": float(getattr(scaler, "_init_scale", 0.0)),
            "growth_interval": getattr(scaler, "_growth_interval", None), "growth_factor": getattr(scaler, "_growth_factor", None),
            "steps": 0, "updates": 0, "unscales": 0, "scales": 0, "skipped": 0, "run": 0, "longest": 0, "first_skips": 0, "direct": 0, "optimizers": 0,
            "lines": {}, "history": [], "recorded": 0, "built_at_step": self.session.step, "direct_at": None})
        row["instances"] += 1
        if len(self.of) > 200:
            self.of = {k: v for k, v in self.of.items() if v[0]() is not None}
        self.of[id(scaler)] = (weakref.ref(scaler), row)
        return row

    @quiet
    def constructed(self, scaler: Any) -> None:
        """A scaler is about to be initialised; it is looked at when it is first used."""
        if len(self.born) < 100:
            self.born[id(scaler)] = construction_line(scaler)

    def taken(self, optimizer: Any) -> int:
        """Steps that an optimizer has completed."""
        loop = self.training.by_id.get(id(optimizer))
        return int(loop.steps if loop is not None else 0) + int(self.training.lane.counted(optimizer))

    @quiet
    def event(self, scaler: Any, event: str, optimizer: Any = None, before: bool = False) -> None:
        row = self.row(scaler)
        key = id(optimizer)
        if optimizer is not None and event in ("steps", "unscales") and self.session.guard.armed("step"):
            count = self.taken(optimizer)
            known = self.seen.get(key)
            if known is not None and (event == "unscales" or before):
                row["direct"] += count - known
            if event == "steps" and not before and row["enabled"]:
                skipped = known is not None and count == known
                row["skipped"] += skipped
                row["run"] = row["run"] + 1 if skipped else 0
                row["longest"] = max(row["longest"], row["run"])
                row["first_skips"] += skipped and row["skipped"] == row["steps"] + 1
            self.seen[key] = count
            if len(self.seen) > 100:
                self.seen.clear()
        if before:
            return
        row[event] += 1
        if event not in row["lines"]:
            at = user_line()
            row["lines"][event] = at.to_json() if at is not None else None
        if event == "scales":
            self.observer.scaled = bool(row["enabled"])
        elif event in ("unscales", "updates"):
            self.observer.scaled = False
        if event == "updates":
            self._updated(scaler, row)

    def _updated(self, scaler: Any, row: dict[str, Any]) -> None:
        n = row["updates"]
        if n & (n - 1) == 0 or n % 256 == 0 or (row["run"] and row["run"] & (row["run"] - 1) == 0):
            scale = getattr(scaler, "_scale", None)
            if scale is not None and len(row["history"]) < MAX_HISTORY:
                row["history"].append([n, scalar(scale)])
        if self.recording:
            self.recording = False
            self.training.stop_trace()
        elif row["run"] >= IN_A_ROW and row["recorded"] < MAX_RECORDED and row["run"] & (row["run"] - 1) == 0 and not self.training.tracer.armed:
            row["recorded"] += 1
            if self.training.tracer.arm("skipped steps"):
                self.recording = True
                self.training.hooks.attach("trace", self.observer.enter, self.observer.leave)

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        for ref, row in self.of.values():
            scaler = ref()
            if scaler is not None and getattr(scaler, "_scale", None) is not None:
                row["history"] = [*row["history"][:MAX_HISTORY], [row["updates"], scalar(scaler._scale)]]
        for row in self.rows.values():
            self.session.fact("scaler", row["at"], **{k: v for k, v in row.items() if k not in ("at", "run", "recorded")})


def told(session: Session, original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """``original`` with ``tell(before, args, kwargs)`` called before and after, under the guard."""
    guard = session.guard

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not guard.armed("scaler"):
            return original(*args, **kwargs)
        start = perf_counter()
        try:
            tell(True, args, kwargs)
        except Exception:
            guard.failed("scaler")
        session.own += perf_counter() - start
        result = original(*args, **kwargs)
        start = perf_counter()
        try:
            tell(False, args, kwargs)
        except Exception:
            guard.failed("scaler")
        session.own += perf_counter() - start
        return result

    passed: Callable[..., Any] = passing(wrapper)
    return passed


def install(session: Session, scaling: Scaling) -> None:
    scaler = torch.amp.GradScaler
    passed = session.on_compile

    def patch(name: str, ours: Any) -> None:
        original = getattr(scaler, name)
        setattr(scaler, name, ours)
        passed.append(lambda: setattr(scaler, name, original) if getattr(scaler, name) is ours else None)

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Not ``__init__``: torch's warning there names the line two frames up."""
        made = object.__new__(cls)
        if session.guard.armed("scaler"):
            try:
                scaling.constructed(made)
            except Exception:
                session.guard.failed("scaler")
        return made

    scaler.__new__ = passing(__new__)
    for method, event in (("scale", "scales"), ("unscale_", "unscales"), ("step", "steps"), ("update", "updates")):
        def tell(before: bool, args: Any, kwargs: Any, event: str = event) -> None:
            if event == "steps" or not before:
                optimizer = args[1] if len(args) > 1 and event in ("steps", "unscales") else kwargs.get("optimizer")
                scaling.event(args[0], event, optimizer, before)
        patch(method, told(session, getattr(scaler, method), tell))
