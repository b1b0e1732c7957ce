"""The backward tap: ``torch.autograd.backward``, which ``Tensor.backward`` looks up at each call."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Any

import torch

from osler.watch.autograd import Backwards
from osler.watch.compiler import invisible, passing
from osler.watch.readout import light
from osler.watch.session import Session


def install(session: Session, backwards: Backwards) -> None:
    original = torch.autograd.backward
    depth = [0]
    guard = session.guard

    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, *args: Any, **kwargs: Any) -> Any:
        if depth[0]:
            return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
        if session.fast:
            session.leave_fast()
            backwards.count = 0  # this pass is counted below
        depth[0] = 1
        try:
            if guard.armed("backward"):
                start = perf_counter()
                try:
                    backwards.before(tensors, retain_graph)
                except Exception:
                    guard.failed("backward")
                session.own += perf_counter() - start
            backwards.tracer.paused += 1
            try:
                original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            finally:
                backwards.tracer.paused -= 1
            if guard.armed("backward"):
                start = perf_counter()
                try:
                    backwards.after()
                except Exception:
                    guard.failed("backward")
                session.own += perf_counter() - start
        finally:
            depth[0] = 0

    full = invisible(passing(backward))
    torch.autograd.backward = full

    lane = backwards.training.lane
    quick = light(original, full, lane.losses, backwards.passing)
    lane.register(torch.autograd, "backward", full, invisible(passing(quick)))
