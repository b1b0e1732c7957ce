"""The one place where tensor values become Python numbers. CPU tensors only: on a device this would stall the training
thread, so device values go through ``DeviceRing``, which crosses once per flush, asynchronously.
"""

from __future__ import annotations

from typing import Any

import torch

NAN = float("nan")


def on_cpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cpu)


def scalar(tensor: Any) -> float:
    """Value of a one-element CPU tensor; NaN for anything else (never synchronises with a device)."""
    if isinstance(tensor, torch.Tensor):
        if tensor.device.type != "cpu" or tensor.numel() != 1:
            return NAN
        value = tensor.detach().item()
        return float(value.real if isinstance(value, complex) else value)
    return float(tensor) if isinstance(tensor, int | float) else NAN


def true(tensor: torch.Tensor) -> bool:
    """Truth of a one-element CPU tensor; false for one on a device."""
    return tensor.is_cpu and scalar(tensor) == 1.0


def light(original: Any, full: Any, kept: list[float]) -> Any:
    """The backward of the fast lane: reads a loss that lies on the CPU into ``kept`` and hands over to ``full`` when it is not
    finite. One frame, since each costs a microsecond or two where it runs cold."""

    def quick(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        value = 0.0
        if tensors.__class__ is torch.Tensor and tensors.is_cpu:
            try:
                value = tensors.item()
                kept.append(value)
            except (RuntimeError, TypeError, ValueError):
                value = 0.0
        if value - value == 0.0:
            return original(tensors, *args, **kwargs)
        return full(tensors, *args, **kwargs)

    return quick


def numbers(tensor: torch.Tensor) -> list[float]:
    """Values of a small CPU tensor, [] for a device tensor."""
    if tensor.device.type != "cpu":
        return []
    values = tensor.detach().flatten().double().tolist()
    return [float(v) for v in values]


def integers(tensor: torch.Tensor) -> list[int]:
    if tensor.device.type != "cpu":
        return []
    return [int(v) for v in tensor.detach().flatten().tolist()]


def array(tensor: torch.Tensor) -> Any:
    """A CPU tensor as a numpy array (no copy), ``None`` for a device tensor or a type numpy does not know."""
    if tensor.device.type != "cpu" or tensor.is_sparse:
        return None
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


class DeviceRing:
    """One float per step kept on the device and copied to pinned memory without waiting.

    ``push`` queues one tiny device copy. ``take`` returns the values of a copy that has finished, or ``[]``.
    Written for CUDA streams and events; on CPU builds it is never constructed.
    """

    def __init__(self, device: torch.device, size: int = 1024) -> None:
        self._ring = torch.full((size,), NAN, device=device)
        self._host = torch.full((size,), NAN, pin_memory=True)
        self._steps: list[int] = []
        self._flying: tuple[Any, list[int]] | None = None

    def push(self, step: int, value: torch.Tensor) -> None:
        if len(self._steps) < self._ring.numel() and value.numel() == 1:
            self._ring[len(self._steps)].copy_(value.detach().reshape(()), non_blocking=True)
            self._steps.append(step)

    def take(self) -> list[tuple[int, float]]:
        done: list[tuple[int, float]] = []
        if self._flying is not None and self._flying[0].query():
            steps = self._flying[1]
            done = list(zip(steps, self._host[: len(steps)].tolist(), strict=True))
            self._flying = None
        if self._flying is None and self._steps:
            self._host.copy_(self._ring, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._flying, self._steps = (event, self._steps), []
        return done
