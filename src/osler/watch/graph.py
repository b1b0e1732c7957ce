"""Walks of the autograd graph: which leaves a loss reaches, which operations lie on the way, and their code lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MAX_NODES = 60_000
VIEW_NODES = frozenset((
    "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "ToCopyBackward0", "TransposeBackward0",
    "PermuteBackward0", "ExpandBackward0", "SliceBackward0", "SelectBackward0", "IndexBackward0", "CloneBackward0", "UnsafeViewBackward0",
    "AliasBackward0", "TBackward0", "AsStridedBackward0", "SplitBackward0", "UnbindBackward0", "CatBackward0", "StackBackward0"))
ZERO_DERIVATIVE = frozenset(("SignBackward0", "RoundBackward0", "FloorBackward0", "CeilBackward0", "TruncBackward0"))


@dataclass(slots=True)
class Walk:
    """One breadth-first walk.

    Attributes:
        nodes: autograd nodes in a deterministic order (breadth first from the root).
        leaves: tensors that accumulate gradients.
        reentrant: a reentrant checkpoint hides part of the graph.
        compiled: a compiled region is one coarse node.
        truncated: the graph is larger than what was walked.
    """

    nodes: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    reentrant: bool = False
    compiled: bool = False
    truncated: bool = False
    parents: list[tuple[int, int]] = field(default_factory=list)

    def path(self, index: int) -> tuple[int, ...]:
        """Child numbers that lead from the root to node ``index``; the first entry is the number of the root."""
        steps: list[int] = []
        while index >= 0:
            index, child = self.parents[index]
            steps.append(child)
        return tuple(reversed(steps))

    @property
    def histogram(self) -> dict[str, int]:
        return dict(Counter(self.names))


def walk(roots: Sequence[Any], limit: int = MAX_NODES) -> Walk:
    """Walk from the ``grad_fn`` of one or several tensors."""
    result = Walk()
    seen: set[Any] = set()
    queue: list[Any] = []
    for number, root in enumerate(roots):
        if root is not None and root not in seen:
            seen.add(root)
            queue.append(root)
            result.parents.append((-1, number))
    position = 0
    while position < len(queue):
        node = queue[position]
        position += 1
        name = node.name() if callable(getattr(node, "name", None)) else type(node).__name__
        name = name.rsplit("::", 1)[-1]
        result.names.append(name)
        result.nodes.append(node)
        variable = getattr(node, "variable", None)
        if variable is not None and name.endswith("AccumulateGrad"):
            result.leaves.append(variable)
        elif name == "CheckpointFunctionBackward":
            result.reentrant = True
        elif name.startswith("CompiledFunction"):
            result.compiled = True
        for number, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
                result.parents.append((position - 1, number))
        if position >= limit:
            result.truncated = position < len(queue)
            break
    return result


def follow(roots: Sequence[Any], path: Sequence[int]) -> Any:
    """The node at the end of a path from an earlier walk, ``None`` where this graph differs."""
    if not path or path[0] >= len(roots):
        return None
    node = roots[path[0]]
    for child in path[1:]:
        following = node.next_functions if node is not None else ()
        if child >= len(following):
            return None
        node = following[child][0]
    return node


def chain(node: Any, limit: int = 12) -> list[str]:
    """Names along the first input of each node: how a value was made."""
    names: list[str] = []
    while node is not None and len(names) < limit:
        names.append(type(node).__name__)
        following = [child for child, _ in node.next_functions if child is not None]
        node = following[0] if following else None
    return names


def maker(node: Any) -> str | None:
    """Name of the node that made the values, looking through views and casts."""
    for name in chain(node):
        if name not in VIEW_NODES:
            return name
    return None


class Lines:
    """Code line of graph nodes: from operations recorded in an armed step, and by position in later steps.

    A node made by an operation carries a sequence number; the operation that finished with the smallest number not below it
    made the node. A later graph with the same names in the same order has the same lines.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[str], list[Any]]] = {}

    def learn(self, key: Any, found: Walk, node_ops: list[tuple[int, int]], places: Sequence[Any]) -> None:
        """Remember this graph. ``node_ops`` are (sequence number, operation) pairs, ``places`` the location of each operation."""
        if not node_ops or len(found.nodes) > 20_000:
            return
        import bisect
        pairs = sorted(node_ops)
        numbers = [n for n, _ in pairs]
        lines: list[Any] = []
        for node in found.nodes:
            try:
                number = node._sequence_nr()
            except Exception:
                number = -1
            at = bisect.bisect_left(numbers, number)
            lines.append(places[pairs[at][1]] if number >= 0 and at < len(pairs) else None)
        self._known[key] = (found.names, lines)

    def of(self, key: Any, found: Walk, index: int) -> tuple[Any, str | None]:
        """Place of node ``index`` and how it is known (``graph position``, ``unique operation`` or ``None``)."""
        for known in ([self._known[key]] if key in self._known else []) + list(self._known.values()):
            names, lines = known
            if names == found.names:
                return lines[index], "graph position"
        wanted = found.names[index]
        for names, lines in self._known.values():
            places = {repr(lines[i]): lines[i] for i, name in enumerate(names) if name == wanted and lines[i] is not None}
            if len(places) == 1:
                return next(iter(places.values())), "unique operation"
        return None, None
