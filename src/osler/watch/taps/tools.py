"""Activation checkpointing, seeds, and compilers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from osler.watch.compiler import passing, quiet
from osler.watch.observe import Observer
from osler.watch.session import Session
from osler.watch.trace import tensors_in
from osler.watch.where import user_line


class Tools:
    """Counters of helper calls, written when they double and at the end."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.seeds = 0
        session.finishers.append(self.finish)

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
                "module": self.session.registry.module_id(function) if isinstance(function, torch.nn.Module) else None,
                "output_requires_grad": any(t.requires_grad for t in tensors_in((result,))),
                "uids": [self.session.registry.uid(p) for p in parameters if p.requires_grad][:500]}
        row["calls"] += 1

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        for row in self.checkpoints.values():
            self.session.fact("checkpoint-call", row["at"], **{k: v for k, v in row.items() if k != "at"})


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
