"""What the walk of ``lineage`` knows of a value, a statistic, a division of rows; and which names stand for targets and for features."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from osler.rules.script import calls, root

LABEL = re.compile(r"^(self\.)?_?(y|ys|yy|[yY]_\w+|[yY](all|full|tr|va|te|train|val|test)|\w*labels?|\w*targets?|tgts?|outcomes?|responses?|classes|cls)$")
FEATURE = re.compile(r"^(self\.)?_?([xX]s?|[xX]_?\w{0,6}|\w*feat\w*|inputs?|data\w*|df\w*|frame|table|imgs?|images|matrix)$")
FRAME = re.compile(r"^(df|frame|table|data|tr|va|train|val|test)\w*$")
NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Statistic:
    """Something learned from all rows of a table. ``kind``: statistic, fit, encoding, selection, vocabulary, copies. ``trail``: the
    lines of the calls that led there, outermost first, and its own."""

    table: int
    trail: tuple[int, ...]
    labels: bool
    kind: str = "statistic"

    @property
    def line(self) -> int:
        return self.trail[-1]


@dataclass(frozen=True, slots=True)
class Value:
    whole: frozenset[int] = NONE
    part: frozenset[int] = NONE
    label: bool = False
    learned: frozenset[Statistic] = frozenset()
    items: tuple[Value, ...] = ()
    made: int = 0
    order: bool = False
    places: bool = False
    mask: bool = False
    turned: bool = False
    names: tuple[str, ...] = ()

    @property
    def rows(self) -> bool:
        return bool(self.whole or self.part)


EMPTY = Value()


def join(values: Iterable[Value]) -> Value:
    """One value made of several."""
    found = list(values)
    if len(found) == 1:
        return found[0]
    whole: frozenset[int] = NONE.union(*(v.whole for v in found)) if found else NONE
    part: frozenset[int] = NONE.union(*(v.part for v in found)) if found else NONE
    same = [v for v in found if v.items]
    items = tuple(join(z) for z in zip(*(v.items for v in same), strict=False)) if same and len({len(v.items) for v in same}) == 1 else ()
    learned: frozenset[Statistic] = frozenset().union(*(v.learned for v in found)) if found else frozenset()
    return Value(whole - part, part, any(v.label for v in found), learned, items, max((v.made for v in found), default=0),
                 mask=any(v.mask for v in found), places=any(v.places for v in found))


@dataclass(frozen=True, slots=True)
class Split:
    """A place where whole tables were cut. ``how``: random, order, folds, group or "" when the index says nothing."""

    trail: tuple[int, ...]
    how: str
    node: ast.AST
    text: str
    tables: frozenset[int]
    pieces: tuple[Value, ...]

    @property
    def line(self) -> int:
        return self.trail[-1]

    def before(self, other: Statistic, birth: tuple[int, ...] = ()) -> int:
        """The line of a statistic, seen from the function where it parts ways with this split, or with the making of its table if
        that is further in."""
        depth = max(_common(other.trail, self.trail), _common(other.trail, birth))
        return other.trail[min(depth, len(other.trail) - 1)]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class Lineage:
    splits: list[Split] = field(default_factory=list)
    births: dict[int, tuple[int, ...]] = field(default_factory=dict)
    applied: list[Value] = field(default_factory=list)
    bound: dict[str, Value] = field(default_factory=dict)


def pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets and values of an assignment, tuples taken apart."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    goal, value = node.targets[0], node.value
    if isinstance(goal, ast.Tuple) and isinstance(value, ast.Tuple) and len(goal.elts) == len(value.elts):
        return list(zip(goal.elts, value.elts, strict=True))
    return [(goal, value)] if not isinstance(goal, ast.Tuple) else []


def named_labels(module: ast.Module) -> tuple[set[str], set[str]]:
    """Names that are handed over as targets, and columns of frames that become such a name."""
    names: set[str] = set()
    for call in calls(module, "TensorDataset", "cross_entropy", "mse_loss", "binary_cross_entropy_with_logits", "train_test_split", "fit"):
        if len(call.args) >= 2 and (name := root(call.args[1])) is not None and not FEATURE.match(name):
            names.add(name)
    columns: set[str] = set()
    for call in calls(module, "TensorDataset"):
        if len(call.args) == 2:
            columns |= {n.attr for n in ast.walk(call.args[1]) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and FRAME.match(n.value.id) and n.attr not in ("values", "shape", "index", "iloc", "loc")}
            columns |= {n.slice.value for n in ast.walk(call.args[1]) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant) and isinstance(n.slice.value, str)}
    for node in ast.walk(module):
        for goal, made in pairs(node):
            target = root(goal) or ""
            if LABEL.match(target) or target in names or ((target.isupper() and "TARGET" in target) or "LABEL" in target):
                columns |= {n.value for n in ast.walk(made) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier()
                            and n.value not in ("int64", "float32", "cpu", "cuda", "long")}
                columns |= {n.attr for n in ast.walk(made) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
                            and FRAME.match(n.value.id) and n.attr not in ("values", "shape", "index", "iloc", "loc", "columns")}
    for call in calls(module, "drop", "pop"):
        columns |= {n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value not in ("columns", "index", "id")}
    return names, columns
