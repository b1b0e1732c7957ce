"""What an experiment works on, and where a forked copy of the process is no option."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from osler.core.facts import Location
from osler.watch.experiments.nested import leaves

MAX_PARAMETERS = 50_000_000
MAX_RESIDENT = 8 << 30


@dataclass
class Capture:
    """References taken at a training step's forward and criterion; nothing is copied.

    Attributes:
        root: the trained root module, ``root_id`` its id in the facts.
        names: dotted name of each module below it, by ``id(module)``.
        built_at: construction line of a module, if known.
        args, kwargs, output: what the root's forward got and returned.
        target, criterion_input: what the criterion got, if there was one.
        targets: what every criterion of the step got, the last one included.
        loaders: ``(index, DataLoader)`` of the loaders alive; active: index of the one that served the newest batch, -1 without one.
    """

    root: nn.Module
    root_id: int
    names: dict[int, str]
    built_at: Callable[[nn.Module], Location | None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    target: torch.Tensor | None = None
    criterion_input: torch.Tensor | None = None
    loaders: list[tuple[int, Any]] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    active: int = -1


def obstacle(capture: Capture) -> str | None:
    """Why no forked experiment on this capture is possible here, or ``None``."""
    return process_obstacle() or _modules(capture.root) or _tensors(capture)


def process_obstacle() -> str | None:
    """Why this process cannot be forked now, or ``None``."""
    if not hasattr(os, "fork") or not hasattr(signal, "setitimer"):
        return "no fork on this platform"
    if threading.current_thread() is not threading.main_thread():
        return "not the main thread"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "the program is being compiled"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a functorch transform"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode is active"
    accelerator = torch.cuda.is_initialized() or (hasattr(torch, "xpu") and torch.xpu.is_initialized())
    if accelerator:
        return "an accelerator is in use"
    if (size := _resident()) > MAX_RESIDENT:
        return f"{size >> 20} MiB resident: too much for a cheap fork"
    return None


def _modules(root: nn.Module) -> str | None:
    for module in root.modules():
        kind = type(module)
        if kind.__name__ in ("OptimizedModule", "GraphModule") or getattr(module, "_compiled_call_impl", None) is not None:
            return "a compiled module"
        if isinstance(module, torch.jit.ScriptModule):
            return "a scripted module"
        if kind.__name__ == "FullyShardedDataParallel" or kind.__name__.startswith("FSDP"):
            return "a sharded module"
    return None


def _tensors(capture: Capture) -> str | None:
    total = 0
    for tensor in _all(capture):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer if hasattr(nn, "Buffer") else nn.Parameter):
            return f"a tensor of type {type(tensor).__name__}"
        if tensor.device.type != "cpu":
            return f"a tensor on {tensor.device.type}"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "inside a functorch transform"
        if tensor.is_shared():
            return "memory shared with other processes"
    for parameter in capture.root.parameters():
        total += parameter.numel()
    if total > MAX_PARAMETERS:
        return f"{total} parameters: too many for a cheap copy"
    return None


def _all(capture: Capture) -> Iterator[torch.Tensor]:
    yield from capture.root.parameters()
    yield from capture.root.buffers()
    for _, tensor in leaves((capture.args, capture.kwargs)):
        # A batch that a worker process made lies in shared memory; nobody writes it any more and the child may not.
        if not tensor.is_shared():
            yield tensor


def _resident() -> int:
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
