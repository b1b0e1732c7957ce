"""The one place where tensor values become Python numbers. CPU tensors only: on a device this would stall the training
thread, so device values come by the ``Courier``, which brings copies over without waiting.
"""

from __future__ import annotations

from typing import Any

import torch

NAN = float("nan")
HOST = {"cpu"}
"""Types of device whose values can be read at once."""


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type in HOST


def scalar(tensor: Any) -> float:
    """Value of a one-element CPU tensor; NaN for anything else (never synchronises with a device)."""
    if isinstance(tensor, torch.Tensor):
        if tensor.device.type not in HOST or tensor.numel() != 1:
            return NAN
        value = tensor.detach().item()
        return float(value.real if isinstance(value, complex) else value)
    return float(tensor) if isinstance(tensor, int | float) else NAN


def true(tensor: torch.Tensor) -> bool:
    """Truth of a one-element CPU tensor; false for one on a device."""
    return on_cpu(tensor) and scalar(tensor) == 1.0


def light(original: Any, full: Any, kept: list[float], elsewhere: Any) -> Any:
    """The backward of the fast lane: reads a loss that lies on the CPU into ``kept`` and hands over to ``full`` when it is not
    finite; a loss of a device goes to ``elsewhere``. One frame, since each costs a microsecond or two where it runs cold."""

    def quick(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        value = 0.0
        if tensors.__class__ is torch.Tensor:
            if tensors.is_cpu and HOST:
                try:
                    value = tensors.item()
                    kept.append(value)
                except (RuntimeError, TypeError, ValueError):
                    value = 0.0
            else:
                elsewhere(tensors)
        if value - value == 0.0:
            return original(tensors, *args, **kwargs)
        return full(tensors, *args, **kwargs)

    return quick


def numbers(tensor: torch.Tensor) -> list[float]:
    """Values of a small CPU tensor, [] for a device tensor."""
    if tensor.device.type not in HOST:
        return []
    values = tensor.detach().flatten().double().tolist()
    return [float(v) for v in values]


def integers(tensor: torch.Tensor) -> list[int]:
    if tensor.device.type not in HOST:
        return []
    return [int(v) for v in tensor.detach().flatten().tolist()]


def array(tensor: torch.Tensor) -> Any:
    """A CPU tensor as a numpy array (no copy), ``None`` for a device tensor or a type numpy does not know."""
    if tensor.device.type not in HOST or tensor.is_sparse:
        return None
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

