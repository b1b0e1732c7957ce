"""How the user's containers grow: lengths of lists, dicts and their like, of graphs that variables carry, and of registries
(hooks, parameter groups), at spaced steps and ends of passes, with the resident memory.

Looked at are the variables of the user's frames on the stack and of their modules, and what hangs on them within a few steps.
Only numbers and names are kept, never the objects.
"""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections import deque
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from osler.watch.compiler import quiet
from osler.watch.elements import CONTAINERS, PLAIN, TENSORS, attributes, describe, newest, nodes, resident
from osler.watch.session import Session
from osler.watch.where import is_user, shorten

SECONDS = 0.004
"""What one look may take."""
MAX_SERIES = 400
WALKS = 8
POINTS = 24
WRITTEN = 40
LIBRARY_OBJECTS = (DataLoader, Dataset, Sampler)


class Series:
    """One container over time. Only its name is known from look to look: a list made anew falls back to its start."""

    __slots__ = ("bytes", "element", "first_bytes", "grad", "id", "lens", "made", "maxlen", "name", "steps", "type", "where")

    def __init__(self, name: str, kind: str, where: list[Any] | None) -> None:
        self.name, self.type, self.where = name, kind, where
        self.steps: list[int] = []
        self.lens: list[int] = []
        self.element = ""
        self.bytes = self.first_bytes = 0
        self.grad = False
        self.maxlen: int | None = None
        self.id = 0
        self.made = 0

    def add(self, step: int, length: int, number: int) -> None:
        if self.steps and self.steps[-1] == step:
            self.lens[-1] = length
            return
        if len(self.steps) >= POINTS:
            del self.steps[1::2], self.lens[1::2]
        self.made += number != self.id
        self.id = number
        self.steps.append(step)
        self.lens.append(length)

    @property
    def grew(self) -> bool:
        return len(self.lens) >= 3 and self.lens[-1] > self.lens[0] and self.lens[-1] >= max(self.lens)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "where": self.where, "steps": list(self.steps), "lens": list(self.lens), "element": self.element,
                "bytes": self.bytes, "grad": self.grad, "maxlen": self.maxlen, "remade": self.made > 2}


class Growth:
    """Looks, and keeps a series for each container."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.series: dict[str, Series] = {}
        self.memory: list[tuple[int, int, int]] = []
        self.looks = 0
        self.passes = 0
        self.next_write = 50
        self._seen: set[int] = set()
        self._end = 0.0
        self._walks = 0
        self._step = 0
        session.finishers.append(self.finish)

    @quiet
    def look(self) -> None:
        """Called on the training thread, with the user's frames on the stack."""
        start = perf_counter()
        session = self.session
        if session.writer is None or sys.gettrace() is not None or session.finished:
            return
        self._begin(start)
        frame: types.FrameType | None = sys._getframe(1)
        modules: dict[int, tuple[str, dict[str, Any]]] = {}
        while frame is not None and perf_counter() < self._end:
            code = frame.f_code
            if is_user(code):
                where = [shorten(code.co_filename), code.co_firstlineno, code.co_name]
                modules.setdefault(id(frame.f_globals), (shorten(code.co_filename), frame.f_globals))
                if code.co_name != "<module>":
                    self._variables(frame, where)
            frame = frame.f_back
        for file, variables in modules.values():
            self._namespace(variables, [file, 0, "<module>"])
        self._registries()
        self.looks += 1
        session.own += perf_counter() - start
        if session.step >= self.next_write:
            self.next_write = session.step * 2
            self.tell()

    def passed(self) -> None:
        """A pass over a loader ended."""
        self.passes += 1
        if self.passes <= 4 or self.passes & (self.passes - 1) == 0 or self.passes % 10 == 0:
            self.look()

    def _begin(self, start: float) -> None:
        self._end = start + SECONDS
        self._seen.clear()
        self._walks = 0
        self._step = self.session.step
        if len(self.memory) < 200:
            self.memory.append((self._step, resident(), sys.getallocatedblocks()))

    def _variables(self, frame: types.FrameType, where: list[Any]) -> None:
        """Before Python 3.13 ``f_locals`` is a copy that the frame keeps: it is emptied again, and not asked for where the
        user's code may hold that very copy."""
        code = frame.f_code
        if sys.version_info >= (3, 13):
            self._namespace(dict(frame.f_locals), where)
            return
        if not code.co_flags & inspect.CO_OPTIMIZED or {"locals", "vars", "eval", "exec", "dir"} & set(code.co_names):
            return
        held = frame.f_locals
        try:
            self._namespace(held, where)
        finally:
            held.clear()

    def _namespace(self, variables: dict[str, Any], where: list[Any]) -> None:
        for name, value in list(variables.items()):
            if perf_counter() > self._end:
                break
            if not name.startswith("__"):
                self._visit(value, name, where, 0)

    def _visit(self, value: Any, name: str, where: list[Any] | None, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN or kind is types.ModuleType or id(value) in self._seen:
            return
        if issubclass(kind, torch.Tensor):
            if kind in TENSORS:
                self._tensor(value, name, where)
            return
        self._seen.add(id(value))
        if issubclass(kind, CONTAINERS):
            self._container(value, name, where, depth)
        elif hasattr(kind, "__array_interface__") and kind.__module__ == "numpy":
            self._note(name, "ndarray", where, int(value.size), id(value)).bytes = int(value.itemsize)
        elif kind.__name__ == "DataFrame" and kind.__module__.startswith("pandas"):
            self._note(name, "DataFrame", where, len(value), id(value)).element = "row"
        elif kind.__name__ == "_lru_cache_wrapper":
            info = value.cache_info()
            self._note(name, "lru_cache", where, info.currsize, id(value)).maxlen = info.maxsize
        elif kind is types.FunctionType:
            for cell_name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                try:
                    self._visit(cell.cell_contents, cell_name, where, depth + 1)
                except ValueError:
                    continue
        elif depth < 4:
            self._object(value, name, where, depth)

    def _object(self, value: Any, name: str, where: list[Any] | None, depth: int) -> None:
        """Attributes of the user's own objects and classes, of loaders, data sets and optimizers. Objects are asked for their type
        only: a proxy would wake up where its class is asked for."""
        kind = type(value)
        if issubclass(kind, type):
            if users(value):
                self._attributes({k: v for k, v in vars(value).items() if not k.startswith("__")}, value.__name__, where, depth)
            return
        if issubclass(kind, Optimizer):
            self._note(name + ".param_groups", "param_groups", where, len(value.param_groups), id(value.param_groups)).element = "group"
            return
        if issubclass(kind, logging.Logger):
            for handler in value.handlers:
                self._visit(handler, f"{name}.handler", where, depth + 1)
            return
        if kind is types.MethodType:
            self._visit(value.__self__, name, where, depth + 1)
        elif users(kind) or issubclass(kind, LIBRARY_OBJECTS):
            self._attributes(attributes(value), name, where, depth)
            if users(kind):
                self._visit(kind, kind.__name__, where, depth)
            if issubclass(kind, nn.Module):
                for child_name, child in value._modules.items():
                    if child is not None:
                        self._visit(child, f"{name}.{child_name}", where, depth + 1)

    def _attributes(self, held: dict[str, Any], name: str, where: list[Any] | None, depth: int) -> None:
        for key, value in list(held.items()):
            if perf_counter() > self._end:
                return
            if isinstance(key, str) and key not in SKIPPED:
                self._visit(value, f"{name}.{key}", where, depth + 1)

    def _container(self, value: Any, name: str, where: list[Any] | None, depth: int) -> None:
        base: Any = next(c for c in CONTAINERS if issubclass(type(value), c))
        length = int(base.__len__(value))
        series = self._note(name, type(value).__name__, where, length, id(value))
        series.maxlen = value.maxlen if isinstance(value, deque) else None
        last = newest(value) if length else None
        if length and (not series.element or length > series.lens[0]):
            element, size, grad = describe(last)
            series.element, series.grad = element, series.grad or grad
            series.first_bytes = series.first_bytes or size
            series.bytes = size
        if depth < 4 and length <= 32:
            items = list(dict.items(value)) if base is dict else enumerate(list.copy(value)) if base is list else ()
            for key, inner in items:
                if not issubclass(type(inner), (*PLAIN, torch.Tensor)) and type(key) in (int, str):
                    self._visit(inner, f"{name}[{key!r}]", where, depth + 1)

    def _tensor(self, value: torch.Tensor, name: str, where: list[Any] | None) -> None:
        """A variable that carries a graph: how many nodes; one without, how many elements."""
        node = None
        try:
            node = value.grad_fn
        except RuntimeError:
            return
        if node is not None:
            if self._walks < WALKS:
                self._walks += 1
                series = self._note(name, "graph", where, nodes(node), id(value))
                series.grad, series.element = True, "tensor" if value.numel() > 1 else "scalar"
        elif not isinstance(value, nn.Parameter) and value.dim():
            self._note(name, "tensor", where, value.numel(), id(value)).bytes = value.element_size()

    def _registries(self) -> None:
        """Hooks on modules, all together."""
        count = 0
        for module in self.session.registry.modules():
            count += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            if perf_counter() > self._end:
                return
        if count:
            self._note("hooks", "hooks", None, count, 0).element = "hook"
        pyplot = sys.modules.get("matplotlib._pylab_helpers")
        if pyplot is not None:
            self._note("figures", "figures", None, len(pyplot.Gcf.figs), 0).element = "figure"

    def _note(self, name: str, kind: str, where: list[Any] | None, length: int, number: int) -> Series:
        key = f"{where[2] if where else ''}:{name}:{kind}"
        series = self.series.get(key)
        if series is None:
            series = Series(name, kind, where)
            if len(self.series) < MAX_SERIES:
                self.series[key] = series
        series.add(self._step, length, number)
        return series

    def tell(self) -> None:
        """Everything that grew, the heaviest first."""
        session = self.session
        grown = sorted((s for s in self.series.values() if s.grew), key=lambda s: -(s.lens[-1] - s.lens[0]) * max(s.bytes, 1))
        if self.memory and session.writer is not None:
            points = self.memory if len(self.memory) <= 60 else self.memory[:: len(self.memory) // 60 + 1] + self.memory[-1:]
            session.fact("growth", None, containers=[s.to_json() for s in grown[:WRITTEN]], steps=[p[0] for p in points],
                         rss=[p[1] for p in points], blocks=[p[2] for p in points])

    def finish(self) -> None:
        """At the end only the modules' variables are left."""
        main = sys.modules.get("__main__")
        if self.session.writer is None or not self.looks:
            return
        file = getattr(main, "__file__", None)
        self._begin(perf_counter())
        if main is not None and file:
            self._namespace(vars(main), [shorten(file), 0, "<module>"])
        self._registries()
        self.tell()


SKIPPED = frozenset(("_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks",
                     "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_full_backward_hook", "_iterator"))


def users(kind: type) -> bool:
    """A class of the user's own files."""
    module = sys.modules.get(kind.__module__)
    if module is None:
        return False
    known = _USERS.get(kind.__module__)
    if known is None:
        file = getattr(module, "__file__", None)
        known = kind.__module__ == "__main__" or (bool(file) and is_user(compile("0", str(file), "eval")))
        _USERS[kind.__module__] = known
    return known


_USERS: dict[str, bool] = {}
