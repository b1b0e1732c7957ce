"""Order of events per optimizer: were gradients cleared, when, and did a backward come before the step?

No zero_grad is patched: a *sentinel* parameter's gradient is looked at before each backward and each step. ``None``, or an
all-zero tensor whose version moved, means cleared; the same object with the same version means it was left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from osler.core.facts import Location
from osler.watch.readout import on_cpu, scalar


@dataclass(slots=True)
class Loop:
    """What one optimizer went through."""

    index: int
    ref: weakref.ref[torch.optim.Optimizer]
    at: Location | None
    uids: list[int]
    steps: int = 0
    backwards: int = 0
    zero_grads: int = 0
    uncleared: int = 0
    cleared_before: int = 0
    empty: int = 0
    judged: int = 0
    watched: bool = False
    backwards_since: int = 0
    cleared_seen: bool = False
    held: weakref.ref[torch.Tensor] | None = None
    grad_id: int = 0
    grad_version: int = -1
    step_id: int = 0
    step_line: Location | None = None
    backward_line: Location | None = None

    def parameters(self) -> list[torch.Tensor]:
        optimizer = self.ref()
        return [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []

    @property
    def sentinel(self) -> torch.Tensor | None:
        """The parameter that is looked at; ``None`` when none was chosen or it is gone."""
        return self.held() if self.held is not None else None

    def choose(self, registry: Any, reached: Collection[int]) -> None:
        """Pick the sentinel: a small parameter that the loss reaches."""
        if self.sentinel is not None:
            return
        fitting = [p for p in self.parameters() if registry.known_uid(p) in reached]
        if fitting:
            self.held = weakref.ref(min(fitting, key=lambda p: p.numel()))

    def _state(self) -> tuple[int, int]:
        sentinel = self.sentinel
        grad = sentinel.grad if sentinel is not None else None
        return (id(grad), grad._version) if grad is not None else (0, -1)

    def before_backward(self) -> None:
        """The gradient as it is when a backward begins."""
        if self.sentinel is None:
            return
        now, version = self._state()
        if self.watched and not self.cleared_seen:
            if now == 0 or now != self.step_id or (version != self.grad_version and self._is_zero()):
                self.cleared_seen = True
            if self.cleared_seen:
                self.zero_grads += 1
        elif not self.steps and not self.cleared_seen:
            self.cleared_seen = True

    def after_backward(self) -> None:
        self.backwards += 1
        self.backwards_since += 1
        if self.sentinel is not None:
            self.grad_id, self.grad_version = self._state()

    def before_step(self) -> None:
        """The gradient as the optimizer finds it."""
        if self.sentinel is None:
            return
        now, version = self._state()
        if self.backwards_since and self.grad_id and (now == 0 or (version != self.grad_version and self._is_zero())):
            self.cleared_before += 1
        elif now == 0:
            self.empty += 1
        if self.watched and self.backwards_since:
            self.judged += 1
            if now and not self.cleared_seen and now == self.step_id:
                self.uncleared += 1

    def after_step(self) -> None:
        self.steps += 1
        self.restart()

    def restart(self) -> None:
        """A cycle begins that is watched from its start."""
        self.watched = True
        self.backwards_since = 0
        self.cleared_seen = False
        self.step_id, self.grad_version = self._state()
        self.grad_id = 0

    def _is_zero(self) -> bool:
        sentinel = self.sentinel
        grad = sentinel.grad if sentinel is not None else None
        if grad is None:
            return True
        if not on_cpu(grad) or grad.is_sparse:
            return True
        return scalar(grad.detach().flatten()[:4096].abs().sum()) == 0.0

    def to_json(self) -> dict[str, Any]:
        return {"index": self.index, "steps": self.steps, "backwards": self.backwards, "zero_grads": self.zero_grads,
                "uncleared": self.uncleared, "cleared_before": self.cleared_before, "empty": self.empty,
                "judged": self.judged,
                "last_lines": {"step": _line(self.step_line), "backward": _line(self.backward_line)}}


def _line(at: Location | None) -> list[Any] | None:
    return at.to_json() if at is not None else None
