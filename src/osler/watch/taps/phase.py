"""Gradients switched off between steps: perhaps a validation.

Clipping, moving averages and metrics switch them off at every step too. A line where that never led to a module call or a
criterion is asked more and more rarely, so that it neither costs much nor ends the fast lane each time.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from osler.watch.compiler import passing
from osler.watch.observe import Observer
from osler.watch.session import Session


def site() -> tuple[Any, int]:
    """Who enters the context: code and line, of the caller where a decorator does it."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "decorate_context" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def install(session: Session, observer: Observer) -> None:
    guard, idle = session.guard, observer.idle

    def patch(cls: Any) -> None:
        original = cls.__enter__

        @functools.wraps(original)
        def __enter__(self: Any) -> Any:
            if observer.phase is None and session.step and session.writer is not None and not session.in_step and guard.armed("phase"):
                try:
                    key = site()
                    left = idle.get(key)
                    if left is not None and left[0] > 0:
                        left[0] -= 1
                    elif torch.is_grad_enabled():
                        observer.begin_phase(key=key)
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
