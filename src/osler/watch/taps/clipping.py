"""Gradient clipping by ``torch.nn.utils``: thresholds, norms, how much is cut, and which gradients were there to be cut."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from osler.core.facts import Location
from osler.watch.compiler import passing, quiet
from osler.watch.observe import Observer
from osler.watch.readout import NAN, numbers, on_cpu, scalar
from osler.watch.session import Session
from osler.watch.where import library_line, user_line

ROWS = 30
NORMS = 400
ELEMENTS = 1 << 22


class Clips:
    """Calls by line and function; written at growing counts and at the end."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.rows: dict[str, dict[str, Any]] = {}
        session.finishers.append(self.finish)

    @quiet
    def before(self, function: str, limit: float, parameters: list[Any]) -> dict[str, Any] | None:
        """What a sampled call finds: the gradients' origin, and for clipping by value how many elements are beyond the limit."""
        at = user_line()
        key = f"{at}|{function}"
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= ROWS:
                return None
            row = self.rows[key] = self._new(at, function, limit, parameters)
        row["max_norm"], row["last"] = limit, row["max_norm"]
        row["calls"] += 1
        if row["calls"] <= 64 or row["calls"] & (row["calls"] - 1) == 0:
            row[self._origin(parameters)] += 1
            if function == "clip_grad_value_":
                self._elements(row, limit, parameters)
        if row["calls"] <= 200:
            row["per_step"].setdefault(self.session.step, 0)
            row["per_step"][self.session.step] += 1
        return row

    def _new(self, at: Location | None, function: str, limit: float, parameters: list[Any]) -> dict[str, Any]:
        registry = self.session.registry
        uids = [registry.known_uid(p) for p in parameters[:200]]
        return {"at": at, "function": function, "max_norm": limit, "calls": 0, "clipped": 0, "measured": 0, "zero": 0, "norms": [], "fresh": 0, "absent": 0,
                "stale": 0, "shares": [], "factors": [], "per_step": {}, "lib": library_line(), "scaled": self.observer.scaled, "parameters": len(parameters),
                "numel": sum(p.numel() for p in parameters if isinstance(p, torch.Tensor)), "uids": [u for u in uids if u is not None],
                "leaves": all(p.is_leaf for p in parameters if isinstance(p, torch.Tensor))}

    def _origin(self, parameters: list[Any]) -> str:
        """``fresh``: a backward pass wrote these gradients since the last step; ``stale``: the step has used them already; ``absent``: none."""
        if not any(p.grad is not None for p in parameters if isinstance(p, torch.Tensor) and p.is_leaf):
            return "absent"
        inside = {id(p) for p in parameters}
        for loop in self.training.live():
            sentinel = loop.sentinel
            if sentinel is not None and id(sentinel) in inside and loop.watched and loop.steps:
                if loop.backwards_since:
                    return "fresh"
                return "absent" if loop._is_zero() else "stale"
        return "fresh"

    def _elements(self, row: dict[str, Any], limit: float, parameters: list[Any]) -> None:
        grads = [p.grad.detach() for p in parameters if isinstance(p, torch.Tensor) and p.is_leaf and p.grad is not None
                 and on_cpu(p.grad) and not p.grad.is_sparse and p.grad.is_floating_point()]
        total = sum(g.numel() for g in grads)
        if not grads or total > ELEMENTS:
            return
        with torch.no_grad():
            beyond = sum(numbers(torch.stack([(g.abs() > limit).sum().double() for g in grads])))
            full, cut = length(grads), length([g.clamp(-limit, limit) for g in grads])
        row["shares"].append(beyond / total)
        row["factors"].append(full / cut if cut > 0 else NAN)
        if len(row["norms"]) < NORMS and full == full:
            row["norms"].append(full)

    @quiet
    def after(self, row: dict[str, Any], norm: Any) -> None:
        value = scalar(norm) if isinstance(norm, torch.Tensor) else norm if isinstance(norm, float) else NAN
        if value == value:
            row["measured"] += 1
            row["clipped"] += int(value > row["max_norm"])
            row["zero"] += int(value == 0.0)
            if len(row["norms"]) < NORMS:
                row["norms"].append(value)
        if row["calls"] in (64, 512) or row["calls"] % 4096 == 0:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        middle = {name: sorted(v)[len(v) // 2] if (v := [x for x in row[key] if x == x]) else None
                  for name, key in (("median_norm", "norms"), ("cut_share", "shares"), ("factor", "factors"))}
        told = max(("fresh", "stale", "absent"), key=lambda k: row[k])
        position = {"fresh": "after backward", "stale": "after step", "absent": "before backward"}[told]
        per_step = list(row["per_step"].values())[1:-1]
        kept = {k: v for k, v in row.items() if k not in ("at", "norms", "shares", "factors", "per_step", "last")}
        self.session.fact("clip", row["at"], **kept, **middle, position=position, calls_per_step=sorted(per_step)[len(per_step) // 2] if per_step else None)

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        for row in self.rows.values():
            self.write(row)


def length(tensors: list[torch.Tensor]) -> float:
    """L2 norm over CPU tensors."""
    total: float = sum(v * v for v in numbers(torch.stack([n.float() for n in torch._foreach_norm(tensors)])))
    return math.sqrt(total)


def wrap(session: Session, clips: Clips, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A clipping function. In the fast lane it is the original; a generator of parameters is handed on as a generator."""
    guard = session.guard

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        if session.fast or torch.compiler.is_compiling() or not guard.armed("clip"):
            return original(*args, **kwargs)
        start, row = perf_counter(), None
        try:
            given = args[0] if args else kwargs["parameters"]
            held = [given] if isinstance(given, torch.Tensor) else list(given)
            if isinstance(given, types.GeneratorType):
                again = (p for p in held)
                args, kwargs = ((again, *args[1:]), kwargs) if args else (args, {**kwargs, "parameters": again})
            limit = args[1] if len(args) > 1 else kwargs["max_norm" if name == "clip_grad_norm_" else "clip_value"]
            row = clips.before(name, scalar(limit) if isinstance(limit, torch.Tensor) else float(limit), held)
        except Exception:
            guard.failed("clip")
        session.own += perf_counter() - start
        result = original(*args, **kwargs)
        if row is not None:
            start = perf_counter()
            try:
                clips.after(row, result)
            except Exception:
                guard.failed("clip")
            session.own += perf_counter() - start
        return result

    passed: Callable[..., Any] = passing(clip)
    return passed


def install(session: Session, clips: Clips) -> None:
    import torch.nn.utils as utils
    from torch.nn.utils import clip_grad

    from osler.watch.taps.tools import patch

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapped = wrap(session, clips, name, getattr(clip_grad, name))
        patch(session, clip_grad, name, wrapped)
        patch(session, utils, name, wrapped)
