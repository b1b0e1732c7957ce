"""Gradients switched off between steps: perhaps a validation."""

from __future__ import annotations

import functools
from typing import Any

import torch

from osler.watch.compiler import passing
from osler.watch.observe import Observer
from osler.watch.session import Session


def install(session: Session, observer: Observer) -> None:
    guard = session.guard

    def patch(cls: Any) -> None:
        original = cls.__enter__

        @functools.wraps(original)
        def __enter__(self: Any) -> Any:
            if observer.phase is None and session.step and session.writer is not None and not session.in_step and guard.armed("phase"):
                try:
                    if torch.is_grad_enabled():
                        observer.begin_phase()
                except Exception:
                    guard.failed("phase")
            return original(self)

        ours = cls.__enter__ = passing(__enter__)

        def restore() -> None:
            if cls.__enter__ is ours:
                cls.__enter__ = original

        session.on_compile.append(restore)

    patch(torch.no_grad)
    patch(torch.inference_mode)
