"""Temporary global module hooks: the module stack for traces, root calls for captures and validation phases, activation
statistics on sampled steps.

Global hooks touch no instance, so pickling, copying and fast paths of a user's model are unaffected; they are attached for
single steps only, since an idle one already costs some microseconds for each module call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from osler.watch.session import Session

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[nn.Module, tuple[Any, ...], Any], None]


def call_kwargs() -> dict[str, Any]:
    """Keyword arguments of the module call in progress (global hooks are given the positional ones only)."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_code.co_name == "_call_impl":
            found = frame.f_locals.get("kwargs")
            return found if isinstance(found, dict) else {}
        if frame.f_back is None:
            break
        frame = frame.f_back
    return {}


in_functorch = torch._C._functorch.peek_interpreter_stack
"""Not ``None`` inside vmap, grad and their like, whose wrapped tensors hold no values to look at."""


class ModuleHooks:
    """Attach and detach by name; each listener sees every module call while attached."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._handles: dict[str, list[Any]] = {}

    def attached(self, name: str) -> bool:
        return name in self._handles

    def attach(self, name: str, enter: Enter | None = None, leave: Leave | None = None) -> None:
        if name in self._handles:
            return
        guard = self.session.guard
        handles = []
        if enter is not None:
            def before(module: nn.Module, args: tuple[Any, ...], enter: Enter = enter) -> None:
                if in_functorch() is None and guard.armed(name):
                    try:
                        enter(module, args, call_kwargs())
                    except Exception:
                        guard.failed(name)
            handles.append(torch_module.register_module_forward_pre_hook(before))
        if leave is not None:
            def after(module: nn.Module, args: tuple[Any, ...], output: Any, leave: Leave = leave) -> None:
                if in_functorch() is None and guard.armed(name):
                    try:
                        leave(module, args, output)
                    except Exception:
                        guard.failed(name)
            handles.append(torch_module.register_module_forward_hook(after, always_call=True))
        self._handles[name] = handles

    def detach(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()
