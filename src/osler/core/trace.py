"""A recorded stretch of the program as a dataflow graph: every torch operation with its code line, for a few steps.

The watcher records traces (``osler.watch.trace``); rules ask them questions. Nothing here touches torch.

A tensor is an index (*tid*) into ``Trace.tensors``; the same Python object keeps its tid within one trace. An in-place
operation lists the written tensor among its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from osler.core.facts import Location

REQUIRES_GRAD, LEAF, PARAMETER, OLD, STALE_GRAPH = 1, 2, 4, 8, 16

VIEWS = frozenset((
    "view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten", "permute", "transpose", "t", "T", "mT", "expand",
    "expand_as", "view_as", "reshape_as", "contiguous", "ravel", "movedim", "swapaxes", "swapdims", "getitem", "narrow", "select",
    "chunk", "split", "unbind", "to", "float", "double", "half", "bfloat16", "clone", "type_as", "type", "cpu", "cuda",
    "squeeze_", "unsqueeze_", "rearrange", "moveaxis", "diagonal", "index_select", "tensor_split",
))
"""Operations that pass values on unchanged (views, casts, copies, selections)."""

CUTS = frozenset(("detach", "detach_", "data", "numpy", "item", "tolist", "argmax", "argmin", "long", "int", "bool", "round", "floor",
                  "ceil", "sign", "trunc", "gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "multinomial",
                  "bernoulli", "heaviside", "__float__", "__int__", "__array__", "argsort", "bucketize", "searchsorted", "one_hot", "isin"))
"""Operations after which no gradient can flow."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, dtype and flags as first seen. ``storage`` groups views of one buffer; ``uid`` names a parameter (-1: none)."""

    shape: tuple[int, ...]
    dtype: str
    flags: int
    storage: int
    uid: int = -1

    @property
    def requires_grad(self) -> bool:
        return bool(self.flags & REQUIRES_GRAD)

    @property
    def old(self) -> bool:
        """It existed before the trace began."""
        return bool(self.flags & OLD)

    @property
    def stale_graph(self) -> bool:
        """It existed before the trace began and carries an autograd graph of its own."""
        return bool(self.flags & STALE_GRAPH)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        index: position in the trace.
        name: plain name (``softmax``, ``add``, ``sub_``, ``getitem``, ``cross_entropy``; ``@backward``, ``@step``,
            ``@zero_grad`` for events of the loop).
        at: innermost line of the user's own files; ``up`` the user's frames above it, innermost first.
        module: id of the module whose forward was running, -1 outside of any.
        ins, outs: tids.
        kw: scalar arguments by name (``dim``, ``p``, ``training``, ``is_causal``, ``inplace`` ...).
        grad: grad mode was on.
        step: optimizer steps completed.
        values: small figures taken from the operands, e.g. the share of a mask that is set.
    """

    index: int
    name: str
    at: Location | None
    up: tuple[Location, ...]
    module: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    kw: dict[str, Any]
    grad: bool
    step: int
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def in_place(self) -> bool:
        return bool(self.outs) and self.outs[0] in self.ins

    @property
    def lines(self) -> tuple[Location, ...]:
        """The user's frames, innermost first."""
        return ((self.at,) if self.at is not None else ()) + self.up


@dataclass(frozen=True)
class Trace:
    index: int
    why: str
    first_step: int
    last_step: int
    truncated: bool
    tensors: tuple[TensorInfo, ...]
    ops: tuple[Op, ...]

    @cached_property
    def inputs_of(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each operation, its ``(producer operation, tid)`` pairs: who last wrote each of its inputs, views included."""
        last_writer: dict[int, int] = {}
        storage_writer: dict[int, int] = {}
        rows = []
        for op in self.ops:
            found = []
            for tid in op.ins:
                made = last_writer.get(tid, -1)
                storage = self.tensors[tid].storage
                made = max(made, storage_writer.get(storage, -1) if storage >= 0 else -1)
                if made >= 0:
                    found.append((made, tid))
            rows.append(tuple(found))
            for tid in op.outs:
                last_writer[tid] = op.index
                if tid in op.ins and self.tensors[tid].storage >= 0:
                    storage_writer[self.tensors[tid].storage] = op.index
        return tuple(rows)

    def producer(self, tid: int, before: int | None = None) -> Op | None:
        """The operation that last wrote ``tid`` before position ``before`` (default: the end of the trace)."""
        for op in reversed(self.ops[: before if before is not None else len(self.ops)]):
            if tid in op.outs:
                return op
        return None

    def named(self, *names: str) -> Iterator[Op]:
        return (op for op in self.ops if op.name in names)

    def back(self, op: Op, follow: Callable[[Op], bool] = lambda _: True) -> Iterator[Op]:
        """Operations that ``op`` depends on, nearest first (breadth first); an operation where ``follow`` is false is
        yielded but not followed further."""
        seen = {op.index}
        queue = [op.index]
        while queue:
            here = queue.pop(0)
            for made, _ in self.inputs_of[here]:
                if made not in seen:
                    seen.add(made)
                    earlier = self.ops[made]
                    yield earlier
                    if follow(earlier):
                        queue.append(made)

    def source(self, tid: int, before: int, through: Iterable[str] = VIEWS) -> Op | None:
        """The operation that made the *values* of ``tid``: its producer, looking through views, casts and copies."""
        through = frozenset(through)
        op = self.producer(tid, before)
        while op is not None and op.name in through and op.ins:
            earlier = self.producer(op.ins[0], op.index)
            if earlier is None:
                return op
            op = earlier
        return op

    def forward(self, starts: Iterable[int], stop: Callable[[Op], bool] = lambda _: False) -> set[int]:
        """Indices of all operations that use, directly or not, one of the tensors ``starts``; an operation where ``stop``
        is true is included but its outputs are not followed."""
        tainted, written, reached = set(starts), set(), set()
        for op in self.ops:
            if any(t in tainted or (self.tensors[t].storage >= 0 and self.tensors[t].storage in written) for t in op.ins):
                reached.add(op.index)
                if not stop(op):
                    tainted.update(op.outs)
                    if op.in_place and self.tensors[op.outs[0]].storage >= 0:
                        written.add(self.tensors[op.outs[0]].storage)
        return reached

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Trace:
        files = raw["files"]

        def location(pair: Any) -> Location | None:
            return Location(files[pair[0]], pair[1], pair[2] if len(pair) > 2 else "") if pair else None

        tensors = tuple(TensorInfo(tuple(t[0]), t[1], t[2], t[3], t[4]) for t in raw["tensors"])
        ops = tuple(
            Op(i, o["op"], location(o.get("at")), tuple(x for x in map(location, o.get("up", ())) if x is not None), o.get("m", -1),
               tuple(o.get("in", ())), tuple(o.get("out", ())), o.get("kw") or {}, bool(o.get("g", 1)), o.get("s", 0), o.get("v") or {})
            for i, o in enumerate(raw["ops"]))
        return cls(raw["index"], raw.get("why", ""), raw["first_step"], raw["last_step"], bool(raw.get("truncated")), tensors, ops)
