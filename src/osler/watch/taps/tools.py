"""Schedulers, gradient clipping, loss scaling, activation checkpointing, seeds, and compilers."""

from __future__ import annotations

import functools
import sys
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
from osler.watch.trace import tensors_in
from osler.watch.where import construction_line, user_line

SCHEDULER_FIELDS = ("T_max", "eta_min", "total_steps", "step_size", "gamma", "mode", "patience", "factor", "threshold", "total_iters", "milestones", "T_0",
                    "T_mult", "base_lrs", "max_lrs", "cooldown", "min_lrs")


class Tools:
    """Counters of helper calls, written when they double and at the end."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.schedulers: list[tuple[weakref.ref[Any], Location | None, dict[str, Any]]] = []
        self.clips: dict[str, dict[str, Any]] = {}
        self.scalers: dict[int, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.seeds = 0
        session.finishers.append(self.finish)

    # -- schedulers --------------------------------------------------------------------------------------------

    @quiet
    def scheduler(self, instance: Any) -> None:
        at = construction_line(instance)
        optimizer = getattr(instance, "optimizer", None)
        loop = self.training.by_id.get(id(optimizer))
        row = {"class": type(instance).__name__, "optimizer": loop.index if loop is not None else None}
        if len(self.schedulers) < 50:
            self.schedulers.append((weakref.ref(instance), at, row))
        self.session.fact("scheduler", at, **row, steps=0, attrs=_fields(instance))

    def write_schedulers(self) -> None:
        for ref, at, row in self.schedulers:
            instance = ref()
            if instance is not None:
                lr = [scalar(g["lr"]) if isinstance(g.get("lr"), torch.Tensor) else g.get("lr") for g in instance.optimizer.param_groups[:3]]
                self.session.fact("scheduler", at, **row, steps=getattr(instance, "last_epoch", None), attrs=_fields(instance), lr_last=lr)

    # -- clipping ----------------------------------------------------------------------------------------------

    @quiet
    def clip(self, function: str, threshold: float, norm: Any) -> None:
        at = user_line()
        key = f"{at}|{function}"
        row = self.clips.get(key)
        if row is None:
            backwards = self.training.backwards
            if len(self.clips) > 30:
                return
            row = self.clips[key] = {"at": at, "function": function, "max_norm": threshold, "calls": 0, "clipped": 0, "measured": 0, "norms": [],
                                     "scaled": self.observer.scaled, "position": "after backward" if backwards.count else "before backward"}
        row["calls"] += 1
        value = scalar(norm) if isinstance(norm, torch.Tensor) else norm if isinstance(norm, float) else float("nan")
        if value == value:
            row["measured"] += 1
            row["clipped"] += int(value > threshold)
            if len(row["norms"]) < 400:
                row["norms"].append(value)

    def write_clips(self) -> None:
        for row in self.clips.values():
            norms = sorted(row["norms"])
            self.session.fact("clip", row["at"], median_norm=norms[len(norms) // 2] if norms else None,
                              **{k: v for k, v in row.items() if k not in ("at", "norms")})

    # -- loss scaling ------------------------------------------------------------------------------------------

    @quiet
    def scaler_event(self, scaler: Any, event: str) -> None:
        row = self.scalers.setdefault(id(scaler), {"at": user_line(), "steps": 0, "updates": 0, "unscales": 0, "scales": 0, "skipped": 0})
        row[event] += 1
        if event == "scales":
            self.observer.scaled = bool(scaler.is_enabled())
        elif event == "unscales" or event == "updates":
            self.observer.scaled = False

    # -- activation checkpointing ------------------------------------------------------------------------------

    @quiet
    def checkpoint(self, function: Any, use_reentrant: Any, preserve: Any, inputs: list[torch.Tensor], result: Any) -> None:
        at = user_line()
        row = self.checkpoints.get(str(at))
        if row is None:
            if len(self.checkpoints) > 50:
                return
            module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
            parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
            row = self.checkpoints[str(at)] = {
                "at": at, "use_reentrant": use_reentrant, "preserve_rng_state": preserve, "calls": 0, "inputs_require_grad": any(t.requires_grad for t in inputs),
                "output_requires_grad": any(t.requires_grad for t in tensors_in((result,))),
                "uids": [self.session.registry.uid(p) for p in parameters if p.requires_grad][:500]}
        row["calls"] += 1

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        self.write_schedulers()
        self.write_clips()
        for row in self.scalers.values():
            self.session.fact("scaler", row["at"], **{k: v for k, v in row.items() if k != "at"})
        for row in self.checkpoints.values():
            self.session.fact("checkpoint-call", row["at"], **{k: v for k, v in row.items() if k != "at"})


def _fields(instance: Any) -> dict[str, Any]:
    found = {}
    for name in SCHEDULER_FIELDS:
        value = getattr(instance, name, None)
        if isinstance(value, bool | int | float | str) or (isinstance(value, list) and len(value) < 20 and all(isinstance(v, int | float) for v in value)):
            found[name] = value
    return found


def after(session: Session, tap: str, original: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """``original`` with ``tell(result, args, kwargs)`` called afterwards under the guard."""
    guard = session.guard

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        if guard.armed(tap):
            start = perf_counter()
            try:
                tell(result, args, kwargs)
            except Exception:
                guard.failed(tap)
            session.own += perf_counter() - start
        return result

    passed: Callable[..., Any] = passing(wrapper)
    return passed


def patch(session: Session, namespace: Any, name: str, ours: Any) -> None:
    """Replace ``namespace.name`` until a compiler is used, which may have to recognise the original."""
    original = getattr(namespace, name)
    setattr(namespace, name, ours)

    def restore() -> None:
        if getattr(namespace, name) is ours:
            setattr(namespace, name, original)

    session.on_compile.append(restore)


def install(session: Session, tools: Tools) -> None:
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    for cls in (LRScheduler, ReduceLROnPlateau):
        if "__init__" in cls.__dict__:
            cls.__init__ = after(session, "scheduler", cls.__init__, lambda _, args, __: tools.scheduler(args[0]))

    import torch.nn.utils as utils
    from torch.nn.utils import clip_grad

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(clip_grad, name)

        def told(result: Any, args: Any, kwargs: Any, name: str = name) -> None:
            limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
            tools.clip(name, scalar(limit) if isinstance(limit, torch.Tensor) else float(limit), result)

        wrapped = after(session, "clip", original, told)
        patch(session, clip_grad, name, wrapped)
        patch(session, utils, name, wrapped)

    scaler = torch.amp.GradScaler
    for method, event in (("scale", "scales"), ("unscale_", "unscales"), ("step", "steps"), ("update", "updates")):
        patch(session, scaler, method, after(session, "scaler", getattr(scaler, method), lambda _, args, __, event=event: tools.scaler_event(args[0], event)))

    checkpointing = sys.modules.get("torch.utils.checkpoint")
    if checkpointing is not None:
        def checkpointed(result: Any, args: Any, kwargs: Any) -> None:
            tools.checkpoint(args[0], kwargs.get("use_reentrant"), kwargs.get("preserve_rng_state", True), tensors_in(args[1:]), result)
        patch(session, checkpointing, "checkpoint", after(session, "checkpoint", checkpointing.checkpoint, checkpointed))

    def seeded(_: Any, args: Any, kwargs: Any) -> None:
        tools.seeds += 1
        if tools.seeds <= 5:
            value = args[0] if args else kwargs.get("seed")
            session.fact("seed", user_line(), source="torch", value=value if isinstance(value, int) else None)

    torch.manual_seed = after(session, "seed", torch.manual_seed, seeded)
    _compilers(session, tools)


def _compilers(session: Session, tools: Tools) -> None:
    """From the first use of a compiler on, nothing that changes what it sees is armed."""
    def before(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if session.guard.armed("compile"):
                try:
                    if not session.compiled:
                        session.compiled = True
                        for step in session.on_compile:
                            step()
                        session.fact("compile", user_line(), what=name)
                    tools.training.stop_trace()
                except Exception:
                    session.guard.failed("compile")
            return original(*args, **kwargs)
        passed: Callable[..., Any] = passing(wrapper)
        return passed

    torch.compile = before("torch.compile", torch.compile)
    torch.jit.script = before("torch.jit.script", torch.jit.script)
    torch.jit.trace = before("torch.jit.trace", torch.jit.trace)
    if hasattr(torch, "export") and hasattr(torch.export, "export"):
        torch.export.export = before("torch.export", torch.export.export)
