"""The captured module as something to experiment with: repeatable passes over any choice of samples.

Only ever used inside the forked copy: it switches modes and seeds at will.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import nn

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.nested import Path, leaves, replaced

Tensors = dict[Path, torch.Tensor]


class Unclear(Exception):
    """An experiment cannot be judged on this capture; the text says why."""


class Subject:
    """Runs the root module.

    Attributes:
        inputs: tensor arguments by path (``(0, i, ...)`` positional, ``(1, key, ...)`` keyword).
        seconds: duration of the last pass.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        root = capture.root
        self.root: nn.Module = root.module if isinstance(root, nn.parallel.DistributedDataParallel | nn.DataParallel) else root
        self.inputs: Tensors = dict(leaves((capture.args, capture.kwargs)))
        self.outputs: Tensors = dict(leaves(capture.output))
        self.seconds = 0.0
        self._flags = [(m, m.training) for m in self.root.modules()]
        self._grad = False

    def evaluating(self) -> None:
        self.root.eval()

    def wake(self) -> int:
        """Gives weights that are zero throughout (zero-initialised heads, gates, adapters) small values, and says how many.

        The experiments ask how the program is wired; a zero in the way would hide every dependence. Biases may stay zero.
        """
        asleep = [p for name, p in self.root.named_parameters() if p.is_floating_point() and p.numel() and "bias" not in name and not p.detach().any()]
        reseed(0)
        for parameter in asleep:
            parameter.data.normal_(0.0, 0.1)
        return len(asleep)

    def training(self) -> None:
        """Every module in the mode that it has in the real run (a frozen part may be in evaluation mode)."""
        for module, flag in self._flags:
            module.training = flag

    def run(self, new: Tensors | None = None, seed: int | None = 0, watch: AbstractContextManager[Any] | None = None,
            keep: bool = False) -> Tensors:
        """One forward pass; returns the tensors of its output.

        Args:
            new: inputs to use instead of the captured ones.
            seed: state of all random generators before the pass; ``None`` lets them run on.
            watch: a context around the pass.
            keep: hand over the tensors of ``new`` themselves, not copies.
        """
        given = {**self.inputs, **(new or {})}
        if not keep:
            given = {path: tensor.detach().clone().requires_grad_(tensor.requires_grad) for path, tensor in given.items()}
        args, kwargs = replaced((self.capture.args, self.capture.kwargs), given)
        if seed is not None:
            reseed(seed)
        begin = perf_counter()
        try:
            with watch or nullcontext(), torch.set_grad_enabled(self._grad):
                output = self.root(*args, **kwargs)
        except RuntimeError as problem:
            if self._grad or "grad" not in str(problem):
                raise
            # A forward that differentiates (physics-informed, energy models) needs its graph.
            self._grad = True
            return self.run(new, seed, watch, keep)
        self.seconds = perf_counter() - begin
        return {path: tensor.detach() for path, tensor in leaves(output)}


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def is_mask(tensor: torch.Tensor) -> bool:
    """Only zeros and ones: a mask, not values to play with."""
    return tensor.dtype == torch.bool or (tensor.numel() > 0 and bool(((tensor == 0) | (tensor == 1)).all()))


def perturbable(inputs: Tensors, axes: dict[Path, int]) -> list[Path]:
    """Inputs that carry content: all floating-point ones; without any, the first integer one."""
    found = [p for p in axes if inputs[p].is_floating_point() and not is_mask(inputs[p])]
    found = found or [p for p in axes if inputs[p].is_floating_point() and inputs[p].dim() > 1]
    if not found:
        whole = [p for p in axes if not inputs[p].is_floating_point() and not inputs[p].is_complex()]
        found = [p for p in whole if not is_mask(inputs[p])][:1] or whole[:1]
    return found


def figure(value: float) -> float | None:
    """A number for JSON; ``None`` for what is not finite."""
    return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None


Emit = Callable[[dict[str, Any]], None]
