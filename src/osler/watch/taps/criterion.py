"""The criterions of ``torch.nn.functional`` (``torch.nn``'s loss modules call them).

Each wrapper is rebuilt on the globals of ``torch.nn.functional`` so that jit.script, export, fx, vmap and fullgraph compile
see a function they can trace; while compiling it steps aside.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F

from osler.watch.compiler import passing
from osler.watch.criteria import Criteria
from osler.watch.fastlane import FastLane
from osler.watch.session import Session

FUNCTIONS = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss",
             "huber_loss", "kl_div", "ctc_loss", "gaussian_nll_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
             "triplet_margin_loss", "cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
             "soft_margin_loss")


def make(original: Any, name: str, observe: Any) -> Any:
    """The wrapper of one criterion."""

    def criterion(*args, **kwargs):  # type: ignore[no-untyped-def]
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        observe(name, args, kwargs, result)
        return result

    rebuilt = types.FunctionType(passing(criterion).__code__, F.__dict__, name, criterion.__defaults__, criterion.__closure__)
    return functools.update_wrapper(rebuilt, original)


def install(session: Session, criteria: Criteria, lane: FastLane) -> None:
    guard = session.guard
    wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor

    def observe(name: str, args: Any, kwargs: Any, result: Any) -> None:
        if session.writer is None or not isinstance(result, torch.Tensor) or type(result) is not torch.Tensor or not guard.armed("criterion"):
            return
        try:
            if torch.jit.is_tracing() or wrapped_tensor(result):
                return
            with torch._C.DisableTorchFunction():
                criteria.seen(name, args, kwargs, result)
        except Exception:
            guard.failed("criterion")

    for name in FUNCTIONS:
        original = getattr(F, name, None)
        if original is not None:
            full = make(original, name, observe)
            setattr(F, name, full)
            lane.register(F, name, full, original)
