"""What is seen of module calls: captures for experiments, validation phases, training flags, shadow copies."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from osler.core.facts import Location
from osler.watch.compiler import quiet
from osler.watch.courier import LIMIT, Courier
from osler.watch.cycle import Loop
from osler.watch.modules import ModuleHooks
from osler.watch.readout import on_cpu, scalar, true
from osler.watch.session import Session
from osler.watch.trace import Tracer, tensors_in
from osler.watch.where import user_line

DROPOUT = nn.modules.dropout._DropoutNd
BATCHNORM = nn.modules.batchnorm._BatchNorm
PHASE_CALLS = 600
IDLE_SITES = 500


def bring_input(courier: Courier, values: Any, then: Callable[[dict[str, Any]], None]) -> None:
    """``then(figures)`` of the first tensor among a forward's arguments: now, or when a copy of its first rows has come from a device."""
    tensor = next((t for t in tensors_in((values,), 3) if t.numel() and not t.is_sparse and t.device.type != "meta"), None)
    if tensor is None:
        return
    shape = list(tensor.shape)
    part = tensor if on_cpu(tensor) or tensor.dim() == 0 else tensor[: max(1, LIMIT * tensor.shape[0] // tensor.numel())]

    def arrived(copy: torch.Tensor) -> None:
        figures = input_figures((copy,))
        if figures is not None:
            then({**figures, "shape": shape})

    courier.carry((part,), arrived)


def input_figures(values: Any) -> dict[str, Any] | None:
    """Mean, deviation, range and per-channel figures of the first floating tensor among a forward's arguments (CPU only)."""
    for tensor in tensors_in((values,), 3):
        if not on_cpu(tensor) or tensor.numel() == 0 or tensor.is_sparse:
            continue
        row: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if not tensor.is_floating_point():
            return row
        with torch.no_grad():
            x = tensor.detach()
            if x.numel() > 1 << 20 and x.shape[0] > 1:
                x = x[: max(1, (1 << 20) * x.shape[0] // x.numel())]
            x = x.float()
            finite = torch.isfinite(x)
            bad = int(x.numel() - scalar(finite.sum()))
            good = x[finite] if bad else x
            if good.numel() == 0:
                return {**row, "nonfinite": bad}
            row.update(mean=scalar(good.mean()), std=scalar(good.std(unbiased=False)), min=scalar(good.min()), max=scalar(good.max()), nonfinite=bad)
            if x.dim() >= 2 and 1 <= x.shape[1] <= 64 and not bad:
                dims = [d for d in range(x.dim()) if d != 1]
                row["per_channel"] = {"mean": [scalar(v) for v in x.mean(dims)], "std": [scalar(v) for v in x.std(dims, unbiased=False)]}
        return row
    return None


class Phase:
    """A stretch without gradients, or in evaluation mode, between training steps."""

    def __init__(self, step: int, at: Location | None, gap: int, key: Any = None) -> None:
        self.key = key
        self.step = step
        self.at = at
        self.gap = gap
        self.forwards = 0
        self.calls = 0
        self.criterion_calls = 0
        self.grad_enabled = False
        self.loader = -1
        self.roots: dict[int, dict[str, Any]] = {}
        self.input: dict[str, Any] | None = None
        self.line: Location | None = None


class Observer:
    """Listens to module calls while something asked for it."""

    def __init__(self, session: Session, tracer: Tracer, hooks: ModuleHooks) -> None:
        self.session = session
        self.tracer = tracer
        self.hooks = hooks
        self.phase: Phase | None = None
        self.phases = 0
        self.phase_skip = 0
        self.idle: dict[Any, list[int]] = {}
        self.last_phase_step = 0
        self.interleaved = 0
        self.scaled = False
        self.shadows: dict[int, dict[str, Any]] = {}
        self.modes: dict[int, bool] = {}
        self.set_at: dict[int, Location | None] = {}
        self.mode_calls: dict[tuple[str, bool, int], int] = {}
        self.roots_of: dict[int, list[weakref.ref[nn.Module]]] = {}
        self.last_batch: list[weakref.ref[torch.Tensor]] = []
        self.last_loader = -1
        self.training_inputs: dict[int, int] = {}
        self._root_ids: set[int] = set()
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
        self._criterion: tuple[Any, Any] | None = None
        self._targets: list[torch.Tensor] = []
        self.loaders: list[tuple[int, weakref.ref[Any]]] = []
        self.stop_trace: Callable[[], None] = lambda: None
        self.on_training: Callable[[Any, Any], None] = lambda args, kwargs: None
        self.on_judging: Callable[[Any, Any, bool], None] = lambda args, kwargs, whole: None
        self.on_target: Callable[[Any], None] = lambda target: None
        session.finishers.append(self.finish)

    # -- the traced steps --------------------------------------------------------------------------------------

    @quiet
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack = self.tracer.stack
        if not stack and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self._calls = [c for c in self._calls if c[0] is not module][-3:]
            self._calls.append((module, args, kwargs, None))
            self.on_training(args, kwargs)
            root = self.session.registry.module_id(module)
            seen = self.training_inputs.get(root, 0)
            if seen < 4:
                self.training_inputs[root] = seen + 1
                at = user_line()
                bring_input(self.session.courier, (args, kwargs), lambda figures: self.session.fact("input", at, root=root, phase="train", **figures))
        stack.append(self.session.registry.module_id(module))

    @quiet
    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.tracer.stack:
            self.tracer.stack.pop()
        if not self.tracer.stack:
            self._calls = [(m, a, k, output if m is module else o) for m, a, k, o in self._calls]

    def criterion(self, value: Any, target: Any) -> None:
        self._criterion = (value, target)
        self.on_target(target)
        if isinstance(target, torch.Tensor):
            self._targets = [*self._targets[-7:], target]

    def forget(self) -> None:
        self._calls, self._criterion, self._targets = [], None, []
        self.tracer.stack = []

    def capture(self) -> Any:
        """What the experiments need, from the last root called with gradients; ``None`` if nothing fits."""
        if not self._calls:
            return None
        module, args, kwargs, output = self._calls[-1]
        if output is None:
            return None
        from osler.watch.experiments import Capture
        value, target = self._criterion or (None, None)
        names = {id(m): n for n, m in module.named_modules()}
        return Capture(root=module, root_id=self.session.registry.module_id(module), names=names, built_at=self.session.registry.built_at,
                       args=args, kwargs=kwargs, output=output, target=target if isinstance(target, torch.Tensor) else None,
                       criterion_input=value if isinstance(value, torch.Tensor) else None, targets=list(self._targets), active=self.last_loader,
                       loaders=[(i, alive) for i, ref in self.loaders if (alive := ref()) is not None])

    # -- training flags ----------------------------------------------------------------------------------------

    @quiet
    def mode_call(self, module: nn.Module, mode: bool) -> None:
        """``Module.train(mode)`` was called from outside of another module's."""
        at = user_line()
        root = self.session.registry.module_id(module)
        self.set_at[root] = at
        key = (str(at), mode, root)
        self.mode_calls[key] = self.mode_calls.get(key, 0) + 1
        if self.mode_calls[key] == 1 and len(self.mode_calls) <= 50:
            self.session.fact("mode-call", at, training=mode, root=root, count=1, **{"class": type(module).__name__})
        if not mode and self.session.step > 0 and self.phase is None:
            self.begin_phase(at)

    def check_modes(self, loop: Loop, early: bool) -> None:
        """Did the training flag of a root of this optimizer change since the step before?"""
        roots = self.roots_of.get(loop.index)
        if roots is None or (early and loop.steps == 1):
            ours = set(loop.uids)
            registry = self.session.registry
            roots = [weakref.ref(r) for r in registry.roots() if any(registry.known_uid(p) in ours for p in r.parameters())][:8]
            self.roots_of[loop.index] = roots
        for ref in roots:
            root = ref()
            if root is None:
                continue
            number = id(root)
            if self.modes.get(number) is not root.training:
                first = number not in self.modes
                self.modes[number] = root.training
                if first and root.training:
                    continue
                dropout, batchnorm = stochastic(root, training=False)
                key = self.session.registry.module_id(root)
                at = self.set_at.get(key)
                self.session.fact("train-mode", user_line(), root=key, **{"class": type(root).__name__}, training=root.training, first=first,
                                  dropout=dropout[:50], batchnorm=batchnorm[:50], set_at=at.to_json() if at else None)

    # -- phases ------------------------------------------------------------------------------------------------

    @quiet
    def begin_phase(self, at: Location | None = None, key: Any = None) -> None:
        """Gradients were switched off, or a root was put into evaluation mode, between steps."""
        session = self.session
        if session.writer is None or session.compiled:
            return
        if self.phase_skip > 0 and session.step - self.last_phase_step <= 2:
            self.phase_skip -= 1
            return
        session.leave_fast()
        self.phase = Phase(session.step, at, session.step - self.last_phase_step, key)
        self.hooks.attach("phase", enter=self._phase_enter)

    @quiet
    def _phase_enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = perf_counter()
        phase = self.phase
        if phase is None:
            return
        phase.calls += 1
        if phase.calls > (PHASE_CALLS if self.phases < 3 else PHASE_CALLS // 10):
            self.hooks.detach("phase")
        registry = self.session.registry
        key = registry.module_id(module)
        if phase.calls == 1 and not torch.is_grad_enabled():
            self.on_judging(args, kwargs, False)
        seen = phase.roots.get(key)
        if seen is not None:
            if torch.is_grad_enabled() and not seen["grad"]:
                return
            seen["forwards"] += 1
            phase.forwards += 1
        elif self._is_root(module):
            grad = torch.is_grad_enabled()
            if grad and module.training:
                return
            phase.forwards += 1
            phase.grad_enabled = phase.grad_enabled or grad
            dropout, batchnorm = stochastic(module, training=True)
            phase.roots[key] = {"root": key, "class": type(module).__name__, "training": module.training, "forwards": 1, "grad": grad, "at": _json(user_line()),
                                "dropout_active": dropout[:50], "batchnorm_training": batchnorm[:50], "dropout_total": len(dropout),
                                "batchnorm_total": len(batchnorm)}
            phase.line = phase.line or user_line()
            self.on_judging(args, kwargs, True)
            if phase.input is None and (self.phases < 3 or self.phases & (self.phases - 1) == 0):
                early = self.phases < 12

                def arrived(figures: dict[str, Any]) -> None:
                    phase.input = figures
                    if early:
                        self.session.fact("input", phase.line, root=key, phase="validation", **figures)

                bring_input(self.session.courier, (args, kwargs), arrived)
        self.session.own += perf_counter() - start

    def _is_root(self, module: nn.Module) -> bool:
        """A trained root, a wrapper or part of one that is called on its own, or a copy of one."""
        if not self._root_ids or self.session.step < 4:
            self._root_ids = {id(m()) for refs in self.roots_of.values() for m in refs if m() is not None}
            self._root_ids |= {id(s["ref"]()) for s in self.shadows.values() if s["ref"]() is not None}
        return id(module) in self._root_ids

    @quiet
    def end_phase(self, backward: bool = False) -> None:
        """Training goes on (or the run ends). A backward right after one forward with gradients was no validation, whatever
        the mode of the model."""
        phase, self.phase = self.phase, None
        self.hooks.detach("phase")
        if backward and phase is not None and phase.forwards == 1 and all(row["grad"] for row in phase.roots.values()):
            return
        if phase is None:
            return
        empty = not (phase.roots or phase.criterion_calls)
        if phase.key is not None and (phase.key in self.idle or len(self.idle) < IDLE_SITES):
            rest = self.idle.setdefault(phase.key, [0, 1])
            rest[1] = min(2 * rest[1], 1024) if empty else 1
            rest[0] = rest[1] if rest[1] > 4 else 0  # the first two times prove nothing
        if empty:
            return
        step = self.session.step
        short = phase.gap <= 2 and step > 2
        self.interleaved = self.interleaved + 1 if short else 0
        kind = "interleaved" if self.interleaved >= 2 or (short and phase.criterion_calls == 0) else "validation"
        if kind == "interleaved":
            self.phase_skip = min(2 ** self.interleaved, 4096)
        self.last_phase_step = step
        self.phases += 1
        for number in phase.roots:
            shadow = self.shadows.get(number)
            if shadow is not None:
                shadow["validation"] += 1
        if self.phases <= 30 or self.phases & (self.phases - 1) == 0:
            first = phase.line or phase.at
            self.session.fact("phase", first, number=self.phases, first_step=phase.step, gap=phase.gap, forwards=phase.forwards, roots=list(phase.roots.values())[:10],
                              criterion_calls=phase.criterion_calls, grad_enabled=phase.grad_enabled, loader=phase.loader, input=phase.input,
                              begun_at=phase.at.to_json() if phase.at else None, kind=kind)

    # -- shadow copies -----------------------------------------------------------------------------------------

    def look_for_shadows(self, reached: set[int]) -> None:
        """Copies of a trained root: same parameter shapes, in no optimizer, equal values before the first step."""
        registry = self.session.registry
        roots = registry.roots()
        trained = [r for r in roots if any(registry.known_uid(p) in reached for p in r.parameters())]
        for root in roots:
            number = registry.module_id(root)
            if number in self.shadows or root in trained:
                continue
            shapes = [p.shape for p in root.parameters()]
            for model in trained:
                own = list(model.parameters())
                if [p.shape for p in own] == shapes and own and all(on_cpu(p) for p in own):
                    same = all(true((a == b).all()) for a, b in zip(root.parameters(), own, strict=True))
                    if same or type(root) is type(model):
                        self.shadows[number] = {"ref": weakref.ref(root), "of": registry.module_id(model), "class": type(root).__name__, "same": same,
                                                "trained": any(registry.known_uid(p) in registry.stepped or registry.known_uid(p) in registry.loaded for p in own),
                                                "versions": [p._version for p in root.parameters()], "validation": 0, "step": self.session.step,
                                                "print": _print(root)}
                    break

    def write_shadows(self) -> None:
        for number, shadow in self.shadows.items():
            root = shadow["ref"]()
            if root is None:
                continue
            before, now = shadow["print"], _print(root)
            changed = abs(now[0] - before[0]) > 2e-6 * before[1]  # averaging a copy with itself only rounds
            at = self.session.registry.built_at(root)
            self.session.fact("shadow", at, root=number, of=shadow["of"], same_at_start=shadow["same"], changed=changed,
                              called_in="validation" if shadow["validation"] else "unseen", validation_phases=shadow["validation"],
                              trained_before_copy=shadow["trained"], first_seen=shadow["step"], **{"class": shadow["class"]})

    def batch_figures(self) -> dict[str, Any] | None:
        """The last batch a DataLoader served, if any."""
        figures = input_figures([tensor for ref in self.last_batch if (tensor := ref()) is not None])
        return {**figures, "loader": self.last_loader} if figures is not None else None

    @quiet
    def finish(self) -> None:
        self.end_phase()
        self.write_shadows()
        for (_, mode, root), count in list(self.mode_calls.items())[:50]:
            if count > 1:
                self.session.fact("mode-count", None, root=root, training=mode, count=count)


def stochastic(root: nn.Module, training: bool) -> tuple[list[str], list[str]]:
    """Names of dropout layers (p > 0) and batch norms whose training flag equals ``training``."""
    dropout, batchnorm = [], []
    for name, module in root.named_modules():
        if module.training is not training:
            continue
        if isinstance(module, DROPOUT) and module.p > 0:
            dropout.append(name)
        elif isinstance(module, BATCHNORM):
            batchnorm.append(name)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout:
            dropout.append(name)
    return dropout, batchnorm


def _json(at: Location | None) -> Any:
    return at.to_json() if at is not None else None


def _print(root: nn.Module) -> tuple[float, float]:
    """A cheap fingerprint of all parameter values, which changes when any block of them moves, and its scale without cancellation."""
    total = scale = 0.0
    for index, parameter in enumerate(root.parameters()):
        if on_cpu(parameter) and parameter.is_floating_point():
            values = parameter.detach().flatten()[:4096].double()
            value, size = scalar(values.sum()), scalar(values.square().sum()) ** 0.5
            total += (index + 1.37) * (value if math.isfinite(value) else 0.5)
            scale += (index + 1.37) * (size if math.isfinite(size) else 0.0)
    return total, scale
