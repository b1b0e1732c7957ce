"""Backward passes: graph walks, values that are not finite, gradients that never come, experiments on the first batch."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from osler.core.facts import Location
from osler.watch import nonfinite, snapshot
from osler.watch.compiler import quiet
from osler.watch.courier import Late
from osler.watch.cycle import Loop
from osler.watch.graph import ZERO_DERIVATIVE, Lines, Walk, chain, follow, walk
from osler.watch.outburst import Outbursts
from osler.watch.readout import numbers, on_cpu, scalar, true
from osler.watch.session import Session
from osler.watch.trace import Tracer
from osler.watch.where import library_line, user_line

if TYPE_CHECKING:
    from osler.watch.taps.loop import Training

INF = float("inf")
MAX_NONFINITE = 6


class Backwards:
    """State of the backward tap."""

    def __init__(self, session: Session, tracer: Tracer, training: Training) -> None:
        self.session = session
        self.tracer = tracer
        self.training = training
        self.lines = Lines()
        self.total = 0
        self.count = 0
        self.loss = float("nan")
        self.known_loss = False
        self.late: Late | None = None
        self.sum: torch.Tensor | None = None
        self.recent: deque[float] = deque(maxlen=8)
        self.reached: set[int] = set()
        self._front: weakref.ref[torch.Tensor] | None = None
        self.seen_lines: dict[Any, int] = {}
        self.growth: dict[Any, list[tuple[int, int]]] = {}
        self.walk_next = 0
        self.walk_cost = 0.0
        self.nonfinite_facts = 0
        self.nan_gradient_step = -1
        self.poisoned_told = False
        self.never: dict[int, int] = {}
        self.looked = 0
        self.given: dict[int, int] = {}
        self.nonzero: dict[int, int] = {}
        self.risky: list[tuple[str, dict[str, Any], Any]] = []
        self.risk_paths: list[tuple[str, tuple[int, ...], Any, str | None]] = []
        self.risk_cost = 0.0
        self.jobs: list[Any] = []
        self.experimented: set[int] = set()
        self.criteria: Any = None
        self.poll_next = 0.0
        self.before_snapshot: Callable[[], None] = lambda: None
        self.snapshot_taken = False
        self.outbursts = Outbursts(session, training.observer)

    @property
    def front(self) -> torch.Tensor | None:
        """The reached parameter farthest from the loss, while it lives."""
        return self._front() if self._front is not None else None

    # -- entry and exit --------------------------------------------------------------------------------------------

    @quiet
    def before(self, tensors: Any, retain_graph: Any) -> None:
        session = self.session
        if session.writer is None:
            session.open()
            if session.writer is None:
                return
        session.in_step = False
        self.total += 1
        self.count += 1
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        root = roots[0]
        self.loss = value = scalar(root)
        self.known_loss = root.numel() == 1 and on_cpu(root)
        self.late = None
        if not self.known_loss and root.numel() == 1 and root.is_floating_point():
            step = session.step
            self.late = session.courier.scalar(root, lambda value: self.arrived("loss", step, value))
        for loop in self.training.active:
            loop.before_backward()
        finite = value == value and value not in (INF, -INF)
        if self.training.observer.phase is not None:
            self.training.observer.end_phase(backward=True)
        if self.tracer.armed:
            self.tracer.event("@backward", ins=roots)
        if root.numel() == 1 and on_cpu(root) and not finite and self.nonfinite_facts < MAX_NONFINITE:
            self.loss_nonfinite(roots, value)
        if self.late is None:
            if len(self.recent) == 8 and value > 5.0 * self.recent[-1] and finite and self.outbursts.seen(value, self.recent):
                self.training.layers.next = 0
            self.recent.append(value)
        due = self.total >= self.walk_next and (session.budget.allows(self.walk_cost) or self.walk_cost < 3e-3)
        self.risky = []
        if self.tracer.armed or due:
            self.look(roots, retain_graph)
        elif self.risk_paths:
            self.check_risks([r.grad_fn for r in roots])

    @quiet
    def after(self) -> None:
        for loop in self.training.active:
            if loop.sentinel is not None or loop.backwards < 64:
                loop.after_backward()

    def passing(self, root: torch.Tensor) -> None:
        """A device loss in the fast lane: it is only added up on its device, since a sum tells whether all were finite."""
        if root.numel() == 1 and self.session.courier.link.usable(root):
            value = root.detach().reshape(()).float()
            self.sum = value.clone() if self.sum is None or self.sum.device != value.device else self.sum.add_(value)

    def arrived(self, what: str, step: int, value: float) -> None:
        """A loss or gradient norm of a device, some steps after it was made."""
        if what == "loss":
            self.recent.append(value)
        if math.isfinite(value) or self.nonfinite_facts:
            return
        self.nonfinite_facts += 1
        at = next((loop.backward_line for loop in self.training.active if loop.backward_line is not None), None)
        self.session.fact("nonfinite", at or user_line(), None, what=what, value="nan" if value != value else "inf", before_step=False, op=None,
                          op_kind="unknown", operand=None, line_by=None, parameters=[], seen_at=step, recent_losses=[v if math.isfinite(v) else None for v in self.recent],
                          scaled=self.training.observer.scaled, candidates=self._candidates())

    # -- the graph -------------------------------------------------------------------------------------------------

    def look(self, roots: list[torch.Tensor], retain_graph: Any) -> None:
        """Walk the graph and write what it says."""
        start = perf_counter()
        session, registry, training = self.session, self.session.registry, self.training
        self.walk_next = self.total + (1 if self.total < 6 else self.total // 2)
        at, lib = user_line(), library_line()
        for loop in training.loops:
            if loop.steps < 8 and at is not None:
                loop.backward_line = at
        found = walk([r.grad_fn for r in roots if r.grad_fn is not None])
        uids = [registry.uid(leaf) for leaf in found.leaves]
        key = (str(at), lib)
        first = key not in self.seen_lines
        self.seen_lines[key] = self.seen_lines.get(key, 0) + 1
        new = set(uids) - self.reached
        self.reached |= set(uids)
        optimized = training.optimized()
        self.growth.setdefault(key, []).append((session.step, len(found.nodes)))
        if first:
            root = roots[0]
            session.fact("backward", at, lib, root_op=type(root.grad_fn).__name__ if root.grad_fn is not None else None, numel=root.numel(),
                         retain_graph=bool(retain_graph), chain=chain(root.grad_fn), requires_grad=root.requires_grad)
        if self.tracer.armed and self.tracer.node_ops:
            places = [self._place(op) for op in self.tracer.ops]
            self.lines.learn(key, found, list(self.tracer.node_ops), places)
        if first or new or self.seen_lines[key] <= 2:
            self._write_graph(at, found, uids, optimized)
        if new or (first and not self.snapshot_taken):
            self.snapshot_taken = True
            self.before_snapshot()
            snapshot.take(session, optimized, self.reached)
            training.observer.look_for_shadows(self.reached)
            self._find_front(found)
        elif len(self.growth[key]) in (3, 5, 8, 12, 16, 20):
            session.fact("graph-growth", at, lib, steps=[s for s, _ in self.growth[key]], nodes=[n for _, n in self.growth[key]])
        self._note_risks(key, found)
        self.walk_cost = perf_counter() - start
        self._experiment(at)

    def _place(self, op: dict[str, Any]) -> Location | None:
        at = op.get("at")
        return Location(list(self.tracer.files)[at[0]], at[1], at[2]) if at else None

    def _write_graph(self, at: Location | None, found: Walk, uids: list[int], optimized: dict[int, int]) -> None:
        session, registry = self.session, self.session.registry
        reached = set(uids)
        owned = registry.owners(registry.roots())
        foreign = [{"shape": list(leaf.shape), "uid": registry.uid(leaf)} for leaf in found.leaves if id(leaf) not in owned][:50]
        zero: list[dict[str, Any]] = []
        for index, name in enumerate(found.names):
            if name in ZERO_DERIVATIVE and len(zero) < 20:
                place, _ = self.lines.of((str(at), None), found, index)
                zero.append({"op": name, "at": place.to_json() if place else None})
        session.fact("graph", at, nodes=len(found.nodes), reached=sorted(reached)[:5000], reached_unoptimized=sorted(reached - set(optimized))[:2000],
                     unreached_optimized=sorted(set(optimized) - reached)[:2000], foreign=foreign, reentrant=found.reentrant,
                     compiled=found.compiled, truncated=found.truncated, histogram=dict(sorted(found.histogram.items(), key=lambda kv: -kv[1])[:60]),
                     zero_gradient_ops=zero)

    def _find_front(self, found: Walk) -> None:
        """The reached leaf farthest from the loss: a non-finite gradient anywhere nearly always arrives there."""
        fitting = [leaf for leaf in found.leaves if leaf.is_floating_point() and on_cpu(leaf)]
        if fitting:
            far = fitting[-8:]
            self._front = weakref.ref(min(far, key=lambda p: p.numel()))

    def _note_risks(self, key: Any, found: Walk) -> None:
        """Where operations with a possibly singular derivative lie in this graph, so that later ones can be checked quickly."""
        paths: list[tuple[str, tuple[int, ...], Any, str | None]] = []
        for index in nonfinite.risks(found):
            if len(paths) >= 8:
                break
            place, how = self.lines.of(key, found, index)
            paths.append((found.names[index], found.path(index), place, how))
        if paths:
            self.risk_paths = paths
            self.check_risks([found.nodes[0]])

    def check_risks(self, roots: list[Any]) -> None:
        """Operands of those operations in the graph at hand: they explain a gradient that turns out NaN."""
        start = perf_counter()
        self.risky = []
        for name, path, place, how in self.risk_paths:
            node = follow(roots, path)
            if node is not None and type(node).__name__ == name and nonfinite.suspect(name, node):
                verdict = nonfinite.singular(name, node)
                if verdict is not None:
                    self.risky.append((verdict[0], {**verdict[1], "op": name, "line_by": how}, place))
        self.risk_cost = perf_counter() - start

    # -- values gone wrong -----------------------------------------------------------------------------------------

    def loss_nonfinite(self, roots: list[torch.Tensor], value: float) -> None:
        """A loss that is not finite, seen before its backward: the graph still holds the operands."""
        self.nonfinite_facts += 1
        session = self.session
        if self.poisoned_told:
            return
        at, lib = user_line(), library_line()
        found = walk([r.grad_fn for r in roots if r.grad_fn is not None])
        poisoned = [session.registry.uid(leaf) for leaf in found.leaves if on_cpu(leaf) and not true(torch.isfinite(leaf.detach()).all())]
        born = nonfinite.locate(found)
        entered = nonfinite.entered(found)
        order = {index: rank for rank, index in enumerate(nonfinite.execution_order(found))}
        kind, operand, index = "unknown", None, None
        if poisoned:
            kind, (index, operand) = "parameter", entered or (None, None)
        elif born is not None and (entered is None or order[born[0]] <= order[entered[0]]):
            index, kind, operand = born
        elif entered is not None:
            index, operand = entered
            kind = "input"
        self.poisoned_told = bool(poisoned)
        place, how = self.lines.of((str(at), lib), found, index) if index is not None else (None, None)
        session.fact("nonfinite", place or at, lib, what="loss", value="nan" if value != value else "inf", before_step=not poisoned,
                     op=found.names[index] if index is not None else None, op_kind=kind, operand=operand, line_by=how,
                     parameters=poisoned[:50], recent_losses=[v if v == v and abs(v) != INF else None for v in self.recent],
                     backward_at=at.to_json() if at else None, candidates=self._candidates(), batch=self.training.observer.batch_figures())

    def gradient_nonfinite(self, loop: Loop, value: float) -> None:
        """A gradient that is not finite although the loss was: born in backward."""
        if self.nan_gradient_step >= 0 or self.nonfinite_facts >= MAX_NONFINITE or self.loss != self.loss or abs(self.loss) == INF:
            return
        self.nan_gradient_step = self.session.step
        self.nonfinite_facts += 1
        bad = [self.session.registry.uid(p) for p in loop.parameters() if p.grad is not None and on_cpu(p.grad) and not p.grad.is_sparse
               and not true(torch.isfinite(p.grad).all())]
        if not bad:
            return
        kind, operand, place, how = "unknown", None, None, None
        if self.risky:
            kind, operand, place = self.risky[0]
            how = operand.get("line_by")
        else:
            candidates = sorted(self.risk_paths, key=lambda row: nonfinite.LIKELIEST.index(row[0]) if row[0] in nonfinite.LIKELIEST else 99)
            if candidates:
                operand, place, how = {"op": candidates[0][0]}, candidates[0][2], "candidate"
        self.session.fact("nonfinite", place or user_line(), what="gradient", value="nan" if value != value else "inf", before_step=True,
                          op=(operand or {}).get("op"), op_kind=kind, operand=operand, line_by=how, parameters=bad[:200],
                          candidates=self._candidates(),
                          loss=self.loss, recent_losses=list(self.recent), scaled=self.training.observer.scaled)

    def _candidates(self) -> list[dict[str, Any]]:
        """Operations of the known graphs whose derivative can be singular, likeliest first."""
        rank = nonfinite.LIKELIEST
        rows = sorted(self.risk_paths, key=lambda row: rank.index(row[0]) if row[0] in rank else 99)
        return [{"op": row[0], "at": row[2].to_json() if row[2] else None} for row in rows]

    # -- gradients that never come ---------------------------------------------------------------------------------

    def look_at_gradients(self, loop: Loop) -> None:
        """Count, for this optimizer's parameters, who has a gradient and whether it is exactly zero."""
        registry = self.session.registry
        self.looked += 1
        grads, uids = [], []
        for parameter in loop.parameters():
            uid = registry.uid(parameter)
            self.never[uid] = self.never.get(uid, 0) + 1
            if parameter.grad is not None:
                self.given[uid] = self.given.get(uid, 0) + 1
                if on_cpu(parameter.grad) and not parameter.grad.is_sparse and type(parameter.grad) is torch.Tensor:
                    grads.append(parameter.grad)
                    uids.append(uid)
                else:
                    self.nonzero[uid] = 1
        from osler.watch.sampling import norms

        def count(values: torch.Tensor) -> None:
            for uid, norm in zip(uids, numbers(values), strict=True):
                if norm != 0:
                    self.nonzero[uid] = self.nonzero.get(uid, 0) + 1

        if not grads or not self.session.courier.carry((norms([g.detach() for g in grads]),), count):
            for uid in uids:
                self.nonzero[uid] = 1

    def write_gradients(self) -> None:
        if not self.never:
            return
        silent = sorted(uid for uid in self.never if uid not in self.given)
        zero = sorted(uid for uid in self.given if uid not in self.nonzero)
        sometimes = sorted(uid for uid, n in self.given.items() if n < self.never[uid])
        self.session.fact("gradients", steps_seen=self.looked, never=silent[:2000], always_zero=zero[:2000], sometimes=sometimes[:2000],
                          nonzero=len(self.nonzero))

    def unused_losses(self) -> int:
        return self.criteria.unused(self.total) if self.criteria is not None else 0

    # -- experiments -----------------------------------------------------------------------------------------------

    def _experiment(self, at: Location | None) -> None:
        capture = self.training.observer.capture()
        if capture is None or capture.root_id in self.experimented or len(self.experimented) >= 3 or self.jobs:
            return
        if not self.session.budget.allows(0.05) or self.session.rank:
            return
        self.experimented.add(capture.root_id)
        from osler.watch import experiments
        job = experiments.start(capture)
        if job is not None:
            self.jobs.append(job)

    def poll(self) -> None:
        if not self.jobs:
            return
        now = self.session.now()
        if now < self.poll_next:
            return
        self.poll_next = now + 0.02
        self._collect()

    def _collect(self) -> None:
        for job in list(self.jobs):
            results = job.poll()
            if results is not None:
                self.jobs.remove(job)
                for row in results:
                    place = Location.from_json(row.pop("at", None))
                    self.session.fact("experiment", place, **row)

    def finish(self) -> None:
        from time import sleep
        deadline = perf_counter() + 2.0
        while self.jobs and perf_counter() < deadline:
            self._collect()
            if self.jobs:
                sleep(0.01)
        for job in self.jobs:
            job.cancel()  # what was found so far counts
        self._collect()
        for key, points in self.growth.items():
            if len(points) > 2:
                self.session.fact("graph-growth", None, key[1], steps=[s for s, _ in points], nodes=[n for _, n in points], backward_at=key[0])
