"""The training loop: optimizer construction, steps, backward passes. The hot path lives here; ``steps`` hooks it in."""

from __future__ import annotations

import math
import os
import weakref
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from osler.core.signals import STEPS
from osler.watch.autograd import Backwards
from osler.watch.compiler import quiet
from osler.watch.courier import Late, LateRows
from osler.watch.cycle import Loop
from osler.watch.fastlane import FastLane
from osler.watch.modules import ModuleHooks
from osler.watch.observe import Observer
from osler.watch.readout import on_cpu, scalar
from osler.watch.sampling import ActivationSamples, LayerSamples
from osler.watch.session import Session
from osler.watch.trace import Tracer
from osler.watch.where import construction_line, user_line

NAN = float("nan")
FAST_COST = 11e-6
"""Seconds a merely counted step costs (wrappers, counters, finiteness), as bench/overhead found it on a 250 µs step."""
DEFAULTS = ("lr", "momentum", "dampening", "weight_decay", "betas", "eps", "nesterov", "amsgrad", "maximize", "alpha", "rho", "lr_decay", "initial_accumulator_value",
            "decoupled_weight_decay", "centered")


class Training:
    """Everything that happens at optimizer steps and backward passes of one process."""

    def __init__(self, session: Session, tracer: Tracer, hooks: ModuleHooks, observer: Observer) -> None:
        self.session = session
        self.tracer = tracer
        self.hooks = hooks
        self.observer = observer
        self.layers = LayerSamples(session)
        self.activations = ActivationSamples(session, hooks)
        self.loops: list[Loop] = []
        self.active: list[Loop] = []
        self.by_id: dict[int, Loop] = {}
        self.backwards = Backwards(session, tracer, self)
        self.layers.arrived = self.backwards.arrived
        self.late_rows = LateRows(lambda row: session.row("steps", row))
        self.last_end = 0.0
        self.data_wait = 0.0
        self.grad_norm: float | Late = NAN
        self.arms = 0
        self.trace_until: dict[int, int] = {}
        self.cycle_next = 1
        self.locate_step = int(os.environ.get("OSLER_LOCATE_STEP") or -1)
        self.lane = FastLane(session)
        self.skipped = 0
        self.window = 0
        self.cycle_cost = 0.0
        self.plain_own = 0.0
        self.step_seconds = 0.0
        self.last_step = 0
        session.finishers.append(self.finish)

    # -- construction --------------------------------------------------------------------------------------------

    @quiet
    def constructed(self, optimizer: Optimizer) -> None:
        session = self.session
        session.open()
        if session.writer is None:
            return
        session.leave_fast()
        at = construction_line(optimizer)
        uids = [session.registry.uid(p) for group in optimizer.param_groups for p in group["params"]]
        loop = Loop(len(self.loops), weakref.ref(optimizer), at, uids)
        self.loops.append(loop)
        self.active = [*self.live()]
        self.by_id[id(optimizer)] = loop
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.defaults.items()
                 if k in DEFAULTS and isinstance(v, bool | int | float | tuple)}
        session.fact("optimizer", at, index=loop.index, **{"class": type(optimizer).__name__}, uids=uids[:5000], uids_total=len(uids),
                     numel=sum(p.numel() for g in optimizer.param_groups for p in g["params"]), defaults=plain,
                     groups=[{"lr": _number(g.get("lr")), "weight_decay": _number(g.get("weight_decay")), "n": len(g["params"])}
                             for g in optimizer.param_groups[:50]])
        self.arm(loop)

    def adopt(self, optimizer: Optimizer) -> None:
        """An optimizer that existed before the watch began."""
        known = self.by_id.get(id(optimizer))
        if known is None or known.ref() is not optimizer:
            self.constructed(optimizer)

    def arm(self, loop: Loop) -> None:
        """Record the first two steps of this optimizer (and what the others do meanwhile)."""
        if self.locate_step >= 0:
            self._arm_to_locate()
            return
        self.trace_until[loop.index] = loop.steps + 2
        if self.tracer.armed or (self.arms >= 4 and not self.session.budget.allows(0.05)) or self.arms >= 12:
            return
        self.arms += 1
        if self.tracer.arm(f"first steps of optimizer {loop.index}"):
            self.hooks.attach("trace", self.observer.enter, self.observer.leave)

    def _arm_to_locate(self) -> None:
        """This process is a second run: look at every value from one given step on until one is not finite."""
        if not self.tracer.armed and self.session.step >= self.locate_step and self.tracer.arm("locate"):
            self.tracer.locate = True

    def live(self) -> list[Loop]:
        return [loop for loop in self.loops if loop.ref() is not None]

    def optimized(self) -> dict[int, int]:
        registry = self.session.registry
        return {registry.uid(p): loop.index for loop in self.live() for p in loop.parameters()}

    # -- steps ---------------------------------------------------------------------------------------------------

    @quiet
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        start = perf_counter()
        session = self.session
        if session.writer is None:
            return
        loop = self.by_id.get(id(optimizer))
        if loop is None or loop.ref() is not optimizer:
            self.constructed(optimizer)
            loop = self.by_id[id(optimizer)]
        if self.observer.phase is not None:
            self.observer.end_phase()
        backwards = self.backwards
        count = loop.steps
        early = count < 8
        if loop.sentinel is None and (early or count & 63 == 0):
            loop.choose(session.registry, backwards.reached)
        loop.before_step()
        self.observer.check_modes(loop, early)
        if early:
            loop.step_line = loop.step_line or user_line()
        if self.tracer.armed:
            self.tracer.event("@step", optimizer=loop.index)
        measured = None
        if early or session.budget.allows(self.layers.norm_cost * 1.5 + 5e-6):
            measured = self.layers.total_norm(loop)
        self.grad_norm = NAN if measured is None else measured
        self._check_gradients(loop, None if isinstance(measured, Late) else measured)
        due = count < 4 or session.step >= self.layers.next
        if spaced(count + 1) or (due and session.budget.allows(self.layers.cost * 1.2)):
            self.layers.before(loop)
        if early or (count & (count + 1)) == 0 or count % 256 == 0:
            backwards.look_at_gradients(loop)
        session.own += perf_counter() - start

    def _check_gradients(self, loop: Loop, measured: float | None) -> None:
        """A gradient that is not finite while the loss was is noticed before the step; with ``--guard`` such a step is skipped."""
        session, backwards = self.session, self.backwards
        value = measured
        if value is None and session.guard_steps:
            norm = self.layers.total_norm(loop)
            value = norm if isinstance(norm, float) else None
        front = backwards.front
        if value is None and front is not None:
            grad = front.grad
            if grad is not None and on_cpu(grad) and not grad.is_sparse:
                value = scalar(grad.detach().flatten()[:4096].sum())
        lost = not math.isfinite(backwards.loss) and backwards.known_loss
        if value is not None and not math.isfinite(value):
            backwards.gradient_nonfinite(loop, value)
            lost = True
        if lost and session.guard_steps:
            for parameter in loop.parameters():
                parameter.grad = None
            self.skipped += 1
            if self.skipped < 8 or self.skipped & (self.skipped - 1) == 0:
                session.fact("guarded", loop.at, optimizer=loop.index, skipped=self.skipped)

    @quiet
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        start = perf_counter()
        session = self.session
        loop = self.by_id.get(id(optimizer))
        session.in_step = False
        if session.writer is None or loop is None:
            return
        session.step += 1
        if self.layers._held is not None:
            before = perf_counter()
            self.layers.after(loop)
            self.layers.cost = (perf_counter() - before) * 2
            self.layers.next = session.step + (1 if session.step < 3 else 8 + session.step // 50)
        loop.after_step()
        if loop.steps == 1:
            session.registry.stepped.update(loop.uids)
        if self.hooks.attached("activations"):
            self.activations.detach()
            self.activations.next = session.step + 8 + session.step // 20
        elif not session.compiled and (spaced(session.step) or (session.step >= self.activations.next
                                                                and session.budget.allows(self.activations.cost * 1.3 + 1e-4))):
            self.activations.attach()
        if self.locate_step >= 0:
            self._arm_to_locate()
        elif self.tracer.armed:
            self._maybe_disarm()
        now = perf_counter()
        step_time = now - self.last_end if self.last_end else NAN
        self.last_end, self.last_step = now, session.step
        if step_time == step_time:
            self.step_seconds = step_time if self.step_seconds == 0 else min(0.9 * self.step_seconds + 0.1 * step_time, 2 * step_time)
        sampled = session.own > 20 * self.cycle_cost > 0
        self.plain_own = session.own
        own = session.own + (now - start)
        groups = optimizer.param_groups
        lr = groups[0].get("lr", NAN) if groups else NAN
        late = self.backwards.late
        self.late_rows.add((session.step, now - session.t0, loop.index, min(self.backwards.count, 65535), late or self.backwards.loss,
                            _number(lr), self.grad_norm, step_time, self.data_wait, own), late is not None or isinstance(self.grad_norm, Late))
        if session.courier.busy:
            session.courier.poll()
            self.late_rows.flush()
        self.data_wait = 0.0
        self.backwards.count = 0
        if session.step >= self.cycle_next:
            self.cycle_next = session.step * 2 if session.step < 64 else session.step + 256
            self.write_cycle()
        self.backwards.poll()
        session.budget.step(step_time if step_time == step_time else 0.0, own)
        self._thin(step_time, self.plain_own + (perf_counter() - start) if not sampled else 0.0)
        session.own = perf_counter() - now
        if spaced(session.step):
            session.look()

    def _thin(self, step_time: float, cost: float) -> None:
        """When watching one whole cycle costs more than the budget allows, look at every n-th cycle only; in between just
        count steps and check that the loss is finite."""
        session = self.session
        if session.step < 24 or self.locate_step >= 0 or session.guard_steps or self.tracer.armed or step_time != step_time:
            return
        self.window -= 1
        if cost > 0:
            self.cycle_cost = cost if self.cycle_cost == 0 else 0.8 * self.cycle_cost + 0.2 * cost
        if self.window > 0:
            return
        allowed = 0.5 * session.budget.share * self.step_seconds
        watched = 2 * max(1, len({loop.index for loop in self.live() if loop.steps}))
        if self.cycle_cost > allowed > 0 or session.budget.tight:
            skip = min(int(watched * self.cycle_cost / max(allowed, 1e-9)) + 1, 4096)
            self.lane.enter(min(session.step + skip, next_spaced(session.step + 1) - 1))
        self.window = watched

    def left_fast(self) -> None:
        """Book what was only counted, and watch again from here."""
        session = self.session
        now = perf_counter()
        skipped, losses, backwards = session.step - self.last_step, self.lane.losses, self.backwards
        pending = losses.pop() if len(losses) == skipped + 1 else NAN  # left between a backward and its step
        self._write_skipped(skipped, now)
        backwards.loss, backwards.known_loss, backwards.late = pending, pending == pending, None
        if self.backwards.sum is not None:
            step, total, self.backwards.sum = session.step, self.backwards.sum, None
            session.courier.scalar(total, lambda value: self.backwards.arrived("loss", step, value))
        for key, count in self.lane.counts.items():
            if key in self.by_id:  # also one that is gone by now: at exit its steps still count
                self.by_id[key].steps += count
        for loop in self.loops:
            loop.restart()
        session.own += FAST_COST * skipped
        session.budget.step(now - self.last_end, 0.0)
        self.last_end, self.last_step = now, session.step
        self.data_wait = 0.0
        backwards.count = int(pending == pending)
        self.lane.counts.clear()

    def _write_skipped(self, skipped: int, now: float) -> None:
        """Rows of the steps that were only counted: step, loss, and a time between the neighbours'; the rest was not measured."""
        losses, writer = self.lane.losses, self.session.writer
        away = self.backwards.sum is not None and not losses
        if writer is None or (len(losses) != skipped and not away) or not skipped or len(self.lane.counts) != 1:
            return
        rows = np.zeros(skipped, STEPS.dtype)
        rows["step"] = np.arange(self.last_step + 1, self.last_step + 1 + skipped)
        rows["t"] = np.linspace(self.last_end, now, skipped + 1)[1:] - self.session.t0
        key = next(iter(self.lane.counts))
        rows["optimizer"] = self.by_id[key].index if key in self.by_id else -1
        rows["backwards"] = 1
        rows["loss"] = losses or NAN
        for name in ("lr", "grad_norm", "step_time", "data_wait"):
            rows[name] = np.nan
        self.late_rows.add_block(lambda: writer.rows("steps", rows))

    def _maybe_disarm(self) -> None:
        done = all(loop.steps >= self.trace_until.get(loop.index, 0) for loop in self.live() if loop.steps or len(self.live()) == 1)
        if done or self.tracer.truncated or self.session.step - self.tracer.first_step > 12:
            self.stop_trace()

    def stop_trace(self) -> None:
        trace = self.tracer.disarm()
        if not self.tracer.armed:
            self.hooks.detach("trace")
            self.observer.forget()
        if trace is not None and self.session.writer is not None:
            self.session.writer.trace(trace)

    def write_cycle(self) -> None:
        self.session.fact("cycle", optimizers=[loop.to_json() for loop in self.loops if loop.steps or loop.ref() is not None][-50:],
                          backwards=self.backwards.total, losses_without_backward=self.backwards.unused_losses())
        self.backwards.write_gradients()

    def finish(self) -> None:
        if self.session.writer is None:
            return
        self.lane.leave()
        self.stop_trace()
        if self.skipped:
            self.session.fact("guarded", None, optimizer=0, skipped=self.skipped)
        self.write_cycle()
        self.session.courier.finish()
        self.late_rows.flush(everything=True)
        self.backwards.finish()


def spaced(step: int) -> bool:
    """Steps 1, 2, 5, 10, 20, 50, 100, ...: measured whatever the budget says, since their cost fades as a run goes on."""
    while step >= 10 and step % 10 == 0:
        step //= 10
    return step in (1, 2, 5)


def next_spaced(step: int) -> int:
    """The first spaced step not below ``step``."""
    size = 1
    while size * 10 <= step:
        size *= 10
    return next(m * size for m in (1, 2, 5, 10) if m * size >= step)


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return scalar(value)
    return float(value) if isinstance(value, int | float) else NAN
