"""Modules coming to life and changing mode."""

from __future__ import annotations

import functools
import sys
from time import perf_counter
from typing import Any

from torch import nn

from osler.core.facts import Location
from osler.watch.compiler import passing
from osler.watch.observe import Observer
from osler.watch.session import Session
from osler.watch.where import construction_line, user_line


class Births:
    """Modules with parameters constructed between optimizer steps, again and again at the same line."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lines: dict[str, dict[str, Any]] = {}
        session.finishers.append(self.write)

    def seen(self, module: nn.Module, at: Location | None) -> None:
        step = self.session.step
        if step < 1 or at is None or len(self.lines) > 200:
            return
        row = self.lines.setdefault(f"{at}|{type(module).__name__}", {"at": at, "class": type(module).__name__, "count": 0, "steps": set(), "inside": None, "uids": set(), "module": None})
        row["count"] += 1
        if len(row["steps"]) < 1000:
            row["steps"].add(step)
        if row["inside"] is None:
            frame = sys._getframe(3)
            for _ in range(12):
                owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
                if isinstance(owner, nn.Module) and owner is not module:
                    row["inside"] = type(owner).__name__
                    break
                if frame.f_back is None:
                    break
                frame = frame.f_back

    def write(self) -> None:
        for row in self.lines.values():
            if row["count"] >= 2:
                self.session.fact("module-built-in-step", row["at"], count=row["count"], steps=len(row["steps"]), inside=row["inside"],
                                  total_steps=self.session.step, **{"class": row["class"]})


def install(session: Session, observer: Observer) -> None:
    guard, registry = session.guard, session.registry
    births = Births(session)
    original_init = nn.Module.__init__

    @functools.wraps(original_init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if guard.armed("module"):
            try:
                at = construction_line(self)
                registry.built(self, at)
                if session.step and type(self).__name__ not in STATELESS:
                    births.seen(self, at)
            except Exception:
                guard.failed("module")

    nn.Module.__init__ = passing(__init__)

    original_setstate = nn.Module.__setstate__

    @functools.wraps(original_setstate)
    def __setstate__(self: nn.Module, state: Any) -> None:
        original_setstate(self, state)
        if guard.armed("module"):
            try:
                registry.built(self, user_line())
            except Exception:
                guard.failed("module")

    nn.Module.__setstate__ = passing(__setstate__)

    original_train = nn.Module.train
    depth = [0]

    @functools.wraps(original_train)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if depth[0] or not guard.armed("mode"):
            return original_train(self, mode)
        depth[0] = 1
        try:
            start = perf_counter()
            try:
                if session.writer is not None:
                    observer.mode_call(self, bool(mode))
                if not mode and observer.tracer.armed and any(isinstance(m, nn.MultiheadAttention) for m in self.modules()):
                    observer.tracer.truncated = True
                    observer.stop_trace()
            except Exception:
                guard.failed("mode")
            session.own += perf_counter() - start
            return original_train(self, mode)
        finally:
            depth[0] = 0

    ours = nn.Module.train = passing(train)

    def restore() -> None:
        if nn.Module.train is ours:
            nn.Module.train = original_train

    session.on_compile.append(restore)


STATELESS = frozenset(("ReLU", "GELU", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "CrossEntropyLoss", "MSELoss", "BCELoss", "BCEWithLogitsLoss", "L1Loss",
                       "NLLLoss", "KLDivLoss", "SmoothL1Loss", "HuberLoss", "Dropout", "Flatten", "MaxPool2d", "AvgPool2d", "Upsample", "Identity",
                       "SiLU", "LeakyReLU", "ELU", "Softplus", "AdaptiveAvgPool2d", "TripletMarginLoss", "CosineSimilarity", "Unfold", "Fold"))
