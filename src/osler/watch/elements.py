"""Looking into the user's objects without running any of the user's code: what a container holds, how heavy it is, whether it carries a graph."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any

import torch
from torch import nn

MAX_NODES = 3000
CONTAINERS = (list, dict, set, deque)
TENSORS = (torch.Tensor, nn.Parameter)  # a subclass may run code of the user's whatever is asked of it
PLAIN = (int, float, complex, str, bytes, bool, type(None))
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def attributes(value: Any) -> dict[str, Any]:
    """The instance's own, without calling a ``__getattr__``; {} for one without."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def newest(value: Any) -> Any:
    """The element put in last, without calling anything of the user's."""
    kind = type(value)
    try:
        if issubclass(kind, list):
            return list.__getitem__(value, -1)
        if issubclass(kind, deque):
            return deque.__getitem__(value, -1)
        if issubclass(kind, dict):
            return next(reversed(dict.values(value)))
        return next(set.__iter__(value))
    except (StopIteration, RuntimeError, IndexError):
        return None


def describe(value: Any, depth: int = 3) -> tuple[str, int, bool]:
    """Kind of an element, its bytes (estimated), and whether it carries an autograd graph."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return ("tensor", *tensor_figures(value)) if kind in TENSORS else ("tensor", 100, False)
    if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
        return "ndarray", int(value.nbytes) + 100, False
    if issubclass(kind, PLAIN):
        return kind.__name__, sys.getsizeof(value) if kind in PLAIN else 64, False
    parts, count = inside(value)
    if parts is None:
        return kind.__name__, 64, False
    inner = [describe(p, depth - 1) for p in parts] if depth else []
    heavy = [i for i in inner if i[0].split(" of ")[-1] in ("tensor", "ndarray")]
    total = 64 + sum(i[1] for i in inner) * max(count, 1) // max(len(inner), 1)
    return f"{kind.__name__} of {(heavy or inner)[0][0]}" if inner else kind.__name__, total, any(i[2] for i in inner)


def tensor_figures(value: torch.Tensor) -> tuple[int, bool]:
    try:
        grad = value.grad_fn is not None
    except RuntimeError:
        grad = False
    return (value.numel() * value.element_size() if value.layout is torch.strided else 0) + 100, grad


def inside(value: Any) -> tuple[list[Any] | None, int]:
    """Up to sixteen parts of a container or object, and how many there are; ``None`` for what has none."""
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))[:16], dict.__len__(value)
    if issubclass(kind, list):
        return list.copy(value)[:16], list.__len__(value)
    if issubclass(kind, tuple):
        return list(tuple.__iter__(value))[:16], tuple.__len__(value)
    if issubclass(kind, deque):
        return list(deque.__iter__(value))[:16], deque.__len__(value)
    held = attributes(value) if kind.__module__ != "builtins" else {}
    return (list(held.values())[:16], len(held)) if held else (None, 0)


def nodes(root: Any) -> int:
    """Nodes of a graph, at most MAX_NODES."""
    seen, queue = {root}, [root]
    while queue and len(seen) < MAX_NODES:
        for child, _ in queue.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return len(seen)


def resident() -> int:
    """Resident memory in bytes, 0 where it cannot be told."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
