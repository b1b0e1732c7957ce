"""Living beside torch.compile, jit.script and export without a trace in them."""

from __future__ import annotations

from typing import Any


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
