"""Questions about axes: did a reshape move an axis, over which axis does an operation run, is a view a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from osler.core.trace import Op, TensorInfo

RESHAPES = frozenset(("view", "reshape", "view_as", "reshape_as"))


def blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive axes whose sizes multiply to the same number: a reshape acts within them only.

    Axes of size 1 are left out. Empty if the shapes hold different numbers of elements.
    """
    a, b = [d for d in before if d != 1], [d for d in after if d != 1]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        left, right, start, begin = a[i], b[j], i, j
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                if i >= len(a):
                    return []
                left *= a[i]
                i += 1
            else:
                if j >= len(b):
                    return []
                right *= b[j]
                j += 1
        found.append((a[start:i], b[begin:j]))
    return found if i == len(a) and j == len(b) else []


def moved_axis(before: Sequence[int], after: Sequence[int]) -> tuple[int, bool] | None:
    """An axis that a reshape pretends to have moved: its size, and whether the shapes leave no other reading.

    Within a block of at least two axes on both sides, a size that occurs once before and once after, at different offsets in
    memory, was meant to move; a reshape cannot do that. Where one size divides the other, stacking neighbours would give the
    same shapes: then the second value is False.
    """
    for old, new in blocks(before, after):
        if len(old) < 2 or len(new) < 2:
            continue
        for size in sorted(set(old) & set(new), reverse=True):
            if old.count(size) != 1 or new.count(size) != 1:
                continue
            i, j = old.index(size), new.index(size)
            ahead, later = product(old[:i]), product(new[:j])
            if ahead != later:
                others = [d for k, d in enumerate(old) if k != i]
                return size, len(new) > 2 or not any(d % size == 0 or size % d == 0 for d in others)
    return None


def product(sizes: Iterable[int]) -> int:
    n = 1
    for d in sizes:
        n *= d
    return n


def axis_of(op: Op, tensor: TensorInfo) -> int | None:
    """The axis a softmax-like operation runs over, counted from the front; torch's implicit choice where none is given."""
    dim = op.kw.get("dim")
    rank = len(tensor.shape)
    if isinstance(dim, int) and not isinstance(dim, bool):
        return dim % rank if rank else 0
    return (0 if rank in (0, 1, 3) else 1) if op.name in ("softmax", "log_softmax") and dim is None else None
