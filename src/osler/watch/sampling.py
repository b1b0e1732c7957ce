"""Sampled measurements: gradient and update norms per parameter, activation statistics per module.

Each sample announces its expected cost to the budget first; what is not allowed is not measured, and the gap stays a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from osler.watch.compiler import quiet
from osler.watch.courier import Late
from osler.watch.cycle import Loop
from osler.watch.halves import Halves
from osler.watch.modules import ModuleHooks
from osler.watch.readout import numbers, on_cpu, scalar
from osler.watch.session import Session

COPY_CAP = 16 << 20
"""Bytes of parameters copied at most to measure one update; beyond it a rotating subset is taken."""


def dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Plain floating tensors, all on the device of the first one."""
    fitting = [t for t in tensors if type(t) in (torch.Tensor, nn.Parameter) and not t.is_sparse and t.is_floating_point() and t.device.type != "meta"]
    return [t for t in fitting if t.device == fitting[0].device]


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """L2 norms [tensors] in one foreach call, where the tensors are."""
    with torch.no_grad():
        return torch.stack([n.float() for n in torch._foreach_norm(tensors)])


class LayerSamples:
    """Gradient, weight and update norms of one optimizer's parameters around a sampled step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.cost = 0.0
        self.norm_cost = 0.0
        self.next = 0
        self._turn = 0
        self.arrived: Callable[[str, int, float], None] = lambda *_: None
        self.halves = Halves(session)
        self._held: tuple[int, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None = None

    def total_norm(self, loop: Loop) -> float | Late | None:
        """L2 norm over all gradients of the optimizer; ``None`` where there is none, on its way where they are on a device."""
        start = perf_counter()
        grads = dense([p.grad for p in loop.parameters() if p.grad is not None])
        total: float | Late | None = None
        if grads and on_cpu(grads[0]):
            total = sum(v * v for v in numbers(norms(grads))) ** 0.5
        elif grads:
            step = self.session.step
            total = self.session.courier.scalar(torch.linalg.vector_norm(norms(grads)), lambda value: self.arrived("gradient", step, value))
        self.norm_cost = perf_counter() - start
        return total

    def before(self, loop: Loop) -> None:
        held: list[torch.Tensor] = []
        total = 0
        parameters = loop.parameters()
        count = len(parameters)
        for offset in range(count):
            parameter = parameters[(self._turn + offset) % count]
            grad = parameter.grad
            if grad is None or not dense([parameter]) or not dense([grad]):
                continue
            total += parameter.numel() * parameter.element_size() * 2
            if total > COPY_CAP and held:
                self._turn = (self._turn + offset) % count
                break
            held.append(parameter)
        if held:
            self._held = (loop.index, held, [p.detach().clone() for p in held], [p.grad.detach().clone() for p in held if p.grad is not None])

    def after(self, loop: Loop) -> None:
        if self._held is None or self._held[0] != loop.index:
            return
        _, parameters, weights, grads = self._held
        self._held = None
        with torch.no_grad():
            changes = torch._foreach_sub([p.detach() for p in parameters], weights)
            products = torch.stack([torch.dot(c.flatten(), g.flatten()).float() for c, g in zip(changes, grads, strict=True)])
            zeros = torch.stack([1.0 - torch.count_nonzero(g).float() / g.numel() for g in grads])
        self.halves.look(loop.index, parameters, weights, grads, changes)
        step, uids = self.session.step, [self.session.registry.uid(p) for p in parameters]

        def write(*columns: torch.Tensor) -> None:
            for uid, grad, weight, change, product, zero in zip(uids, *map(numbers, columns), strict=True):
                self.session.row("layers", (step, uid, grad, weight, change, -product, zero))

        self.session.courier.carry((norms(grads), norms(weights), norms(list(changes)), products, zeros), write)


LEAVES = (nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Linear, nn.modules.conv._ConvNd, nn.Embedding,
          nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.ReLU6, nn.Softplus, nn.Hardtanh, nn.SELU)


ELEMENTS = 1 << 14
"""Elements of one output that are looked at."""


def thinned(values: torch.Tensor) -> torch.Tensor:
    """Some samples, positions or pixels of an output, all of its units: [batch, ..., units] or [batch, units, height, width]."""
    if values.numel() <= ELEMENTS or values.dim() < 2:
        return values[:ELEMENTS] if values.dim() == 1 else values
    if values.dim() == 2:
        return values[: max(16, ELEMENTS // values.shape[1])]
    values = values[:8]
    if values.dim() == 4:
        stride = max(1, math.ceil(math.sqrt(values.numel() / ELEMENTS)))
        return values[:, :, ::stride, ::stride]
    return values[:, :: max(1, math.ceil(values.numel() / ELEMENTS))]


class ActivationSamples:
    """Output statistics of leaf modules for one training step."""

    def __init__(self, session: Session, hooks: ModuleHooks) -> None:
        self.session = session
        self.hooks = hooks
        self.cost = 0.0
        self.next = 0
        self._spent = 0.0
        self._rows = 0
        self._attached = 0
        self._roots: set[int] = set()

    def attach(self) -> None:
        self._spent, self._rows = 0.0, 0
        if self._attached & (self._attached - 1) == 0:  # roots rarely change: looked up again at doubling counts
            start = perf_counter()
            self._roots = {id(m) for m in self.session.registry.roots()}
            self._spent += perf_counter() - start
        self._attached += 1
        self.hooks.attach("activations", leave=self._leave)

    def detach(self) -> None:
        if self.hooks.attached("activations"):
            self.hooks.detach("activations")
            self.cost = self._spent
            self.session.own += self._spent

    @quiet
    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled() or self._rows > 400 or not (isinstance(module, LEAVES) or id(module) in self._roots):
            return
        if not isinstance(output, torch.Tensor):
            output = next((t for t in output if isinstance(t, torch.Tensor)), None) if isinstance(output, tuple | list) else None
        if not isinstance(output, torch.Tensor):
            return
        if output.numel() < 2 or not output.is_floating_point():
            return
        start = perf_counter()
        step, number = self.session.step, self.session.registry.module_id(module)
        with torch.no_grad():
            self.session.courier.carry((thinned(output.detach()),), lambda values: self._write(module, step, number, values))
        self._rows += 1
        self._spent += perf_counter() - start

    def _write(self, module: nn.Module, step: int, number: int, values: torch.Tensor) -> None:
        with torch.no_grad():
            values = values.float()
            zero = values == 0
            std = scalar(values.std(unbiased=False))
            units = self._units(module, zero)
            dead = scalar(units.all(0).float().mean()) if units is not None and units.shape[0] > 1 else float("nan")
            saturated = float("nan")
            if isinstance(module, nn.Sigmoid):
                saturated = scalar(((values < 0.01) | (values > 0.99)).float().mean())
            elif isinstance(module, nn.Tanh):
                saturated = scalar((values.abs() > 0.99).float().mean())
            spread = scalar(values.std(0, unbiased=False).mean()) / std if values.shape[0] > 1 and std > 0 else float("nan")
            self.session.row("activations", (step, number, scalar(values.mean()), std, scalar(zero.float().mean()), dead, saturated, spread))

    @staticmethod
    def _units(module: nn.Module, zero: torch.Tensor) -> torch.Tensor | None:
        """[observations, units]: channels for images, features otherwise."""
        if zero.dim() == 4 and not isinstance(module, nn.Linear | nn.LayerNorm):
            return zero.permute(0, 2, 3, 1).reshape(-1, zero.shape[1])
        return zero.reshape(-1, zero.shape[-1]) if zero.dim() >= 2 else None
