"""Several processes that train together: the group, its wrapper, its collectives, and samples that ranks can be compared by.

Everything is local to this process: no collective is ever issued and nothing waits for another rank. Whether ranks agree is
decided later, by rules that see all of their windows.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from osler.watch.compiler import invisible, passing, quiet
from osler.watch.modules import ModuleHooks
from osler.watch.readout import on_cpu, scalar
from osler.watch.session import Session
from osler.watch.taps.loader import fingerprints
from osler.watch.taps.loop import Training, spaced
from osler.watch.taps.tools import after, patch
from osler.watch.trace import tensors_in
from osler.watch.where import construction_line, is_user, user_line, user_location

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
               "all_to_all", "all_to_all_single", "all_gather_object", "gather_object", "broadcast_object_list", "send", "recv", "isend", "irecv", "all_reduce_coalesced", "batch_isend_irecv")
PARAMETERS, ELEMENTS, CALLS, ROWS, LINES = 200, 4096, 8, 32, 60


class Ranks:
    """What this process does as one of several. Idle until a process group of more than one member exists."""

    def __init__(self, session: Session, training: Training, hooks: ModuleHooks) -> None:
        self.session, self.training, self.hooks = session, training, hooks
        self.world = 1
        self.wrapped: list[weakref.ref[Any]] = []
        self.lines: dict[tuple[Any, int], dict[str, Any]] = {}
        self.counts: dict[int, int] = {}
        self.handles: list[Any] = []
        self.printed: dict[int, int] = {}
        self.left: dict[int, tuple[int, int]] = {}
        self.outside: dict[int, int] = {}
        self.depth = self.calls = 0
        self.seen: list[tuple[int, str]] = []
        self.rows: list[str] = []
        self.row: dict[str, Any] = {}
        session.finishers.append(self.finish)
        session.on_compile.append(self.stop)

    # -- the group ---------------------------------------------------------------------------------------------

    @quiet
    def joined(self, args: Any, kwargs: Any) -> None:
        distributed = torch.distributed
        if not distributed.is_initialized():
            return
        self.world = distributed.get_world_size()
        method = kwargs.get("init_method") or (args[1] if len(args) > 1 else None)
        place = str(method) if method and method != "env://" else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self.session.fact("process-group", user_line(), world=self.world, rank=distributed.get_rank(), backend=str(distributed.get_backend()),
                          meeting=place, clock=time.time())
        if self.world > 1 and not self.handles and not self.session.compiled:
            self.handles = [register_optimizer_step_pre_hook(invisible(self.session.guard.wrap("ranks", self.before_step))),
                            register_optimizer_step_post_hook(invisible(self.session.guard.wrap("ranks", self.after_step)))]
            self.look()

    @quiet
    def wraps(self, wrapper: Any) -> None:
        registry = self.session.registry
        self.wrapped.append(weakref.ref(wrapper))
        self.session.fact("ddp", construction_line(wrapper), root=registry.module_id(wrapper), of=registry.module_id(wrapper.module),
                          uids=[registry.uid(p) for p in wrapper.module.parameters() if p.requires_grad][:5000],
                          **{"class": type(wrapper.module).__name__}, find_unused_parameters=bool(wrapper.find_unused_parameters),
                          static_graph=bool(wrapper.static_graph), broadcast_buffers=bool(wrapper.broadcast_buffers))

    # -- collectives -------------------------------------------------------------------------------------------

    @quiet
    def collective(self, name: str, row: dict[str, Any] | None, key: Any, args: Any, kwargs: Any) -> None:
        session = self.session
        if row is None:
            if len(self.lines) >= LINES:
                return
            at, up = user_location()
            row = self.lines[key] = {"at": at, "up": [place.to_json() for place in up], "name": name, "library": not is_user(key[0]), "calls": 0, "first_step": session.step, "op": None,
                                     "kinds": {}, "numel": 0, "async_op": bool(kwargs.get("async_op")), "position": None}
        found = tensors_in((args, kwargs))
        tensor = found[0] if found else None
        if tensor is not None:
            kind = self.kind(tensor)
            row["kinds"][kind] = row["kinds"].get(kind, 0) + 1
            row["numel"] = max(row["numel"], tensor.numel())
            if row["op"] is None:
                op = kwargs.get("op") or next((a for a in args[1:] if isinstance(a, torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType)), None)
                row["op"] = str(op).rsplit(".", 1)[-1] if op is not None else "SUM"
        if row["position"] is None and not session.fast:
            row["position"] = "after backward" if self.training.backwards.count else "before backward" if session.step == row["first_step"] else None
        row["calls"] += 1
        row["last_step"] = session.step
        session.fact("collective", row["at"], **{k: v for k, v in row.items() if k != "at"})

    def kind(self, tensor: torch.Tensor) -> str:
        """``gradient``, ``parameter``, ``flat`` (one tensor as large as all of them), ``activation`` (carries a graph, or is large) or ``value``."""
        total, place = 0, tensor.data_ptr()
        for module in self.session.registry.modules():
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                total += parameter.numel()
                if parameter is tensor or parameter.data_ptr() == place:
                    return "parameter"
                if parameter.grad is not None and (parameter.grad is tensor or parameter.grad.data_ptr() == place):
                    return "gradient"
        if tensor.is_floating_point() and total and tensor.numel() * 3 >= total and not tensor.requires_grad:
            return "flat"
        if tensor.is_floating_point() and any(tensor.shape == p.shape for loop in self.training.live() for p in loop.parameters()) and tensor.numel() > 64:
            return "like a parameter"
        return "activation" if tensor.requires_grad or tensor.numel() > 64 else "value"

    # -- samples -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """From here to the next step: which roots are called, through the wrapper or past it, and with which rows."""
        self.depth = self.calls = 0
        self.seen, self.rows = [], []
        self.row = {"wrapper": 0, "inner": 0, "inner_at": None, "no_sync": False}
        self.hooks.attach("ranks", self.enter, self.leave)

    @quiet
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        start = perf_counter()
        self.calls += 1
        self.depth += 1
        if torch.is_grad_enabled():
            if isinstance(module, DistributedDataParallel):
                self.row["wrapper"] += 1
                self.row["no_sync"] = not module.require_backward_grad_sync
            elif self.depth == 1 and any((w := ref()) is not None and w.module is module for ref in self.wrapped):
                self.row["inner"] += 1
                self.row["inner_at"] = self.row["inner_at"] or user_line()
            if self.depth == 1 and module.training and len(self.seen) < CALLS and next(module.parameters(), None) is not None:
                self.rows_of(args, kwargs)
        if self.calls > 4000:
            self.hooks.detach("ranks")
        self.session.own += perf_counter() - start

    @quiet
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth = max(0, self.depth - 1)

    def rows_of(self, args: Any, kwargs: Any) -> None:
        total = count = 0
        for index, tensor in enumerate(tensors_in((args, kwargs))[:4]):
            if not on_cpu(tensor) or tensor.is_sparse or tensor.dim() < 1 or not tensor.numel() or tensor.shape[0] > 1 << 16:
                continue
            hashes = fingerprints(tensor)
            if hashes is None:
                continue
            count = max(count, len(hashes))
            total = (total + sum(hashes.tolist()) * (2 * index + 1)) % (1 << 64)  # host: fingerprints are a numpy array
            if tensor.dim() >= 2 and tensor.is_floating_point() and len(self.rows) < ROWS:
                self.rows += [str(h) for h in hashes[: ROWS - len(self.rows)]]
        if count:
            self.seen.append((count, str(total)))

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        done = self.counts.get(key, 0)
        if done and self.left.get(key) != state(optimizer):
            self.outside[key] = self.outside.get(key, 0) + 1
        if done == 0:
            self.write(optimizer, 0)
        if self.hooks.attached("ranks"):
            self.hooks.detach("ranks")
            at = self.row.pop("inner_at", None)
            if self.session.writer is not None and (self.seen or self.row.get("wrapper") or self.row.get("inner")):
                self.session.fact("rank-step", at, **self.row, number=self.session.step + 1, calls=self.seen, rows=self.rows)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        count = self.counts[key] = self.counts.get(key, 0) + 1
        self.left[key] = state(optimizer)
        if spaced(count):
            self.write(optimizer, count)
        if spaced(self.session.step + 1) or self.session.step == 2:
            self.look()

    @quiet
    def write(self, optimizer: Optimizer, count: int) -> None:
        """Numbers that two ranks share exactly when their parameters are the same bits."""
        loop = self.training.by_id.get(id(optimizer))
        if loop is None or self.session.writer is None:
            return
        start = perf_counter()
        parameters = loop.parameters()
        chosen = parameters[:: max(1, -(-len(parameters) // PARAMETERS))]
        values = [fingerprint(p) for p in chosen]
        self.printed[id(optimizer)] = count
        self.session.fact("parameter-print", loop.at, optimizer=loop.index, number=count, values=values, shapes=[list(p.shape) for p in chosen],
                          uids=[self.session.registry.uid(p) for p in chosen], total=len(parameters), sharded=any(_sharded(p) for p in chosen), outside=self.outside.get(id(optimizer), 0))
        self.session.own += perf_counter() - start

    def stop(self) -> None:
        """A compiler is used: its regions hide module calls, and hooks would break its graphs."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.hooks.detach("ranks")

    @quiet
    def finish(self) -> None:
        if self.session.writer is None or self.world < 2:
            return
        for loop in self.training.live():
            optimizer = loop.ref()
            count = self.counts.get(id(optimizer), 0)
            if optimizer is not None and count and self.printed.get(id(optimizer)) != count:
                self.write(optimizer, count)
        for row in self.lines.values():
            self.session.fact("collective", row["at"], **{k: v for k, v in row.items() if k != "at"})


def state(optimizer: Optimizer) -> tuple[int, int]:
    """Changes when something else than the optimizer writes its first parameter: version and place."""
    parameter = optimizer.param_groups[0]["params"][0]
    return parameter._version, parameter.data_ptr()


def fingerprint(parameter: torch.Tensor) -> float | None:
    """A number that depends on every one of the elements looked at; ``None`` for values that are elsewhere."""
    if not on_cpu(parameter) or not parameter.is_floating_point() or _sharded(parameter):
        return None
    with torch.no_grad():
        flat = parameter.detach().flatten()
        values = (flat if flat.numel() <= ELEMENTS else flat[:: -(-flat.numel() // ELEMENTS)]).double()
        return scalar((values * torch.arange(1, values.numel() + 1, dtype=torch.float64).sqrt()).sum())


def _sharded(parameter: torch.Tensor) -> bool:
    return type(parameter) not in (torch.Tensor, nn.Parameter)


def failures(session: Session, record: Callable[..., None], clean: Callable[..., Any]) -> None:
    """Exceptions of worker processes, which multiprocessing catches before any exception hook sees them.

    The traceback is passed on without a frame of ours: a bare ``raise`` adds none.
    """
    from multiprocessing.process import BaseProcess

    spawn = sys.modules.get("torch.multiprocessing.spawn")
    places = [(BaseProcess, "run")] + ([(spawn, "_wrap")] if spawn is not None and hasattr(spawn, "_wrap") else [])

    def told(value: BaseException) -> None:
        trace = value.__traceback__ = value.__traceback__.tb_next if value.__traceback__ is not None else None
        if isinstance(value, Exception) and not getattr(value, "_osler_told", False):
            try:
                trace = value.__traceback__ = clean(trace)
                record(session, type(value), value, trace)
                value._osler_told = True  # type: ignore[attr-defined]
            except Exception:
                session.guard.failed("exception")

    for owner, name in places:
        original = getattr(owner, name)
        if name == "run":
            @functools.wraps(original)
            def run(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                try:
                    return original(self, *args, **kwargs)
                except BaseException as value:
                    told(value)
                    raise
            setattr(owner, name, passing(run))
        else:
            @functools.wraps(original)
            def _wrap(fn: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                @functools.wraps(fn)
                def worker(*inner: Any) -> Any:
                    try:
                        return fn(*inner)
                    except BaseException as value:
                        told(value)
                        raise
                return original(passing(worker), *args, **kwargs)
            setattr(owner, name, passing(_wrap))


def install(session: Session, ranks: Ranks, record: Callable[..., None], clean: Callable[..., Any]) -> None:
    distributed = torch.distributed
    failures(session, record, clean)
    if not distributed.is_available():
        return
    core = sys.modules["torch.distributed.distributed_c10d"]
    joined = after(session, "ranks", core.init_process_group, lambda _, args, kwargs: ranks.joined(args, kwargs))
    for namespace in (distributed, core):
        setattr(namespace, "init_process_group", joined)
    wrap = after(session, "ranks", DistributedDataParallel.__init__, lambda _, args, __: ranks.wraps(args[0]))
    setattr(DistributedDataParallel, "__init__", wrap)

    def counted(name: str, original: Any) -> Any:
        lines, guard = ranks.lines, session.guard

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            key = (frame.f_code, frame.f_lineno)
            row = lines.get(key)
            if row is None or not row["calls"] & (row["calls"] + 1):
                if ranks.world > 1 and guard.armed("ranks") and not torch.compiler.is_compiling():
                    try:
                        ranks.collective(name, row, key, args, kwargs)
                    except Exception:
                        guard.failed("ranks")
            else:
                row["calls"] += 1
                row["last_step"] = session.step
            return original(*args, **kwargs)

        return passing(collective)

    for name in COLLECTIVES:
        original = getattr(core, name, None)
        if original is not None:
            ours = counted(name, original)
            patch(session, core, name, ours)
            if getattr(distributed, name, None) is original:
                patch(session, distributed, name, ours)
