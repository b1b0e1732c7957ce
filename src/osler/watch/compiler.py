"""Living beside torch.compile, jit.script and export without a trace in them."""

from __future__ import annotations

from typing import Any

FRAME = "<osler importlib._bootstrap>"
"""File name of frames that only pass a user's call on. ``warnings`` skips frames whose name holds these two words when it
counts stack levels, so a warning still names the user's line."""


def passing(fn: Any) -> Any:
    """Give a wrapper's code the name of a passing frame (see ``FRAME``); the function is returned."""
    fn.__code__ = fn.__code__.replace(co_filename=FRAME)
    return fn


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
