"""Where the loop is heard: ``Optimizer.__init__`` and the global hooks before and after a step."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from osler.watch.compiler import invisible, passing
from osler.watch.taps.loop import Training

PLAIN = frozenset(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"))
"""Optimizers whose step neither calls another step nor enters ``no_grad``: in the fast lane one hook is enough to count them."""


def install(training: Training) -> None:
    """Patch ``Optimizer.__init__`` and register the global step hooks."""
    session = training.session
    original = Optimizer.__init__

    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if session.guard.armed("optimizer"):
            start = perf_counter()
            try:
                training.constructed(self)
            except Exception:
                session.guard.failed("optimizer")
            session.own += perf_counter() - start

    __init__.__wrapped__ = original  # type: ignore[attr-defined]
    Optimizer.__init__ = passing(__init__)

    open_steps: list[tuple[int, int]] = []
    lane, counts = training.lane, training.lane.counts

    def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        session.in_step = True
        if session.fast:
            lane.depth += 1
            return
        if not session.guard.armed("step"):
            return
        try:
            # A subclass that calls super().step() fires twice; a step that raised never closes, but a backward came since.
            if open_steps and open_steps[-1] != (id(optimizer), training.backwards.total):
                open_steps.clear()
            open_steps.append((id(optimizer), training.backwards.total))
            if len(open_steps) == 1:
                training.before_step(optimizer, args, kwargs)
        except Exception:
            session.guard.failed("step")

    def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if lane.single:
            session.step = step = session.step + 1
            if step < lane.until:
                return
            lane.leave()
            return
        session.in_step = False
        if session.fast:
            lane.depth -= 1
            if lane.depth > 0:
                return
            lane.depth = 0
            session.step += 1
            key = id(optimizer)
            counts[key] = counts.get(key, 0) + 1
            if session.step < lane.until:
                return
            open_steps.clear()
            lane.leave()
            return
        if not session.guard.armed("step"):
            return
        try:
            if open_steps:
                open_steps.pop()
            if not open_steps:
                training.after_step(optimizer, args, kwargs)
        except Exception:
            session.guard.failed("step")

    before, after = invisible(pre), invisible(post)
    handles = {"before": register_optimizer_step_pre_hook(before), "after": register_optimizer_step_post_hook(after)}

    def lighten() -> None:
        alive = training.live()
        if all(type(loop.ref()) in PLAIN for loop in alive):
            handles.pop("before").remove()
            lane.single = id(alive[0].ref()) if len(alive) == 1 else 0

    def restore() -> None:
        if lane.single:  # by its number: at exit the optimizer of a main function is gone already
            counts[lane.single] = session.step - lane.began
            lane.single = 0
        if "before" not in handles:
            handles["before"] = register_optimizer_step_pre_hook(before)
        training.left_fast()

    lane.entered, lane.left = lighten, restore

    def for_dynamo() -> None:
        """From now on Dynamo is loaded anyway: its own decorator keeps hooks out of compiled optimizers without a break."""
        nonlocal before
        lane.leave()
        for handle in handles.values():
            handle.remove()
        before = torch.compiler.disable(pre)
        handles.update(before=register_optimizer_step_pre_hook(before), after=register_optimizer_step_post_hook(torch.compiler.disable(post)))

    session.on_compile.append(for_dynamo)
