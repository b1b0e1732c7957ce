"""Living beside torch.compile, jit.script and export without a trace in them."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

FRAME = "<osler importlib._bootstrap>"
"""File name of frames that only pass a user's call on. ``warnings`` skips frames whose name holds these two words when it
counts stack levels, so a warning still names the user's line."""


def passing(fn: Any) -> Any:
    """Give a wrapper's code the name of a passing frame (see ``FRAME``); the function is returned."""
    fn.__code__ = fn.__code__.replace(co_filename=FRAME)
    return fn


def quiet(fn: Any) -> Any:
    """A tap's entry point: while a user's function or dispatch mode is active, what the tap computes is not shown to it."""
    functions, dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

    @functools.wraps(fn)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if dispatches():
            from torch.utils._python_dispatch import _disable_current_modes
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return fn(*args, **kwargs)
        if functions():
            with torch._C.DisableTorchFunction():
                return fn(*args, **kwargs)
        return fn(*args, **kwargs)

    return entry


def hide(package: str = "osler.watch") -> None:
    """Tell Dynamo to leave all code of this package, and what it calls, alone. Passing frames are left out: the user's own
    calls run through them. Uses a private strategy call where this torch has it."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
        deep = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    except Exception:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in list(vars(module).values()):
                members = list(vars(value).values()) if isinstance(value, type) and value.__module__ == name else [value]
                for member in members:
                    for code in codes(member):
                        set_code_exec_strategy(code, deep)


def codes(member: Any) -> list[types.CodeType]:
    """Code objects of a function or method of ours, nested ones included."""
    code = getattr(getattr(member, "__func__", member), "__code__", None)
    if not isinstance(code, types.CodeType) or "osler" not in code.co_filename or code.co_filename == FRAME:
        return []
    found, todo = [], [code]
    while todo:
        here = todo.pop()
        found.append(here)
        todo += [c for c in here.co_consts if isinstance(c, types.CodeType) and c.co_filename != FRAME]
    return found


def invisible(fn: Any) -> Any:
    """Mark a wrapper so that Dynamo neither traces it nor warns: it is called eagerly at the graph break that the wrapped
    function causes anyway. Uses a private strategy call where this torch has it."""
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_recursive = False
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
        set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    except Exception:
        pass
    return fn
