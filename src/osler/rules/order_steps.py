"""Vocabulary of ``row_order``: which functions draw, list, reduce or compare rows, and how two orders are compared."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from osler.rules.script import call_name

Path = tuple[str, ...]
VIA = "through "
"""Prefix of a source that a value owes its rows to as an index: ``centers[y]`` has the rows of ``y``."""
DRAWS = frozenset(("randperm", "permutation", "permuted"))
SEEDS = frozenset(("seed", "manual_seed", "seed_everything", "set_seed"))
FRESH = frozenset(("randn", "rand", "randint", "normal", "uniform", "integers", "random", "standard_normal", "choice", "len", "range", "int", "float",
                   "arange", "super", "print", "zeros", "ones", "linspace"))
LISTINGS = frozenset(("glob", "iglob", "rglob", "listdir", "scandir", "iterdir"))
STILL_ROWS = frozenset(("mean", "sum", "std", "var", "min", "max", "argmax", "argmin", "norm", "prod", "amax", "amin", "median", "any", "all", "logsumexp"))
NOT_ROWS = STILL_ROWS | frozenset(("argsort", "unique", "nonzero", "flatnonzero", "where_index", "size", "numel", "item", "bincount", "quantile", "percentile", "cov",
                                   "multinomial", "searchsorted", "eye", "split", "keys", "items", "index_add", "index_add_",
                                   "scatter_add", "scatter_add_", "scatter", "scatter_", "groupby", "merge", "join", "value_counts", "pivot", "pivot_table", "explode", "melt",
                                   "fit", "corr", "index_put_", "lstsq", "solve", "svd", "inv"))
LOSSES = frozenset(("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
                    "criterion", "loss_fn", "lossfn", "objective", "crit", "loss_func", "ce", "bce", "mse", "multi_margin_loss", "gaussian_nll_loss"))
LABEL = re.compile(r"^(y|t)([A-Z_\d]|b$|tr|va|te|t$|s$|$)|lab|targ|tgt|class|cls|mask|truth|(^|_)gt|annot|outcome|response|rating|(^|_)y(_|$|\d)", re.I)
CHANCE = re.compile(r"random (order|shuffle|split)")
SORT = re.compile(r"sort|argsort|index of|reversed|flip|nlargest|nsmallest")
TIMES = re.compile(r"^(tiled|repeated)")


@dataclass(frozen=True, slots=True)
class Order:
    """Rows of a value: for each source the reorderings since, ``None`` where they are not known; and the variable that holds it."""

    paths: dict[str, Path | None]
    names: frozenset[str]

    def then(self, *steps: str) -> Order:
        return Order({b: follow(p, steps) if p is not None else None for b, p in self.paths.items()}, self.names)


def follow(path: Path, steps: tuple[str, ...]) -> Path | None:
    """Steps appended; an order followed by its inverse is none at all."""
    for step in steps:
        if step.startswith("rows :") and step.endswith(":"):
            continue  # the first rows, in the order they had
        bare = step.removeprefix("rows ")
        if path and undoes(path[-1].removeprefix("rows "), bare):
            path = path[:-1]
        else:
            path = (*path, step)
    return path if len(path) < 12 else None


def undoes(first: str, second: str) -> bool:
    return (second.startswith("argsort(") and second.endswith(f"{first})")) or (second.startswith("index of ") and first in second and first != second)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An input and a target that are paired although their rows were ordered differently.

    Attributes:
        line: where they meet; at: the reordering nearest to it; lines: all reorderings that only one side has.
        extra_x, extra_y: reorderings of one side only; base: the common source.
        how, input, target: in which way and as what expressions they meet.
    """

    line: int
    at: int
    lines: tuple[int, ...]
    extra_x: Path
    extra_y: Path
    base: str
    how: str
    input: str
    target: str
    block: int

    @property
    def kind(self) -> str:
        """``chance`` (a shuffle of one side), ``sort``, ``times`` (copies in another order), ``offset`` (another position) or ``other``."""
        steps = " ".join((*self.extra_x, *self.extra_y))
        if CHANCE.search(steps):
            return "chance"
        if SORT.search(steps):
            return "sort"
        both = [s for s in (*self.extra_x, *self.extra_y) if TIMES.match(s)]
        if len(both) == 2 and self.extra_x and self.extra_y:
            return "times"
        if "roll" in steps or "Add(" in steps or "Sub(" in steps:
            return "offset"
        return "other"


def compare(x: Order, y: Order) -> bool | tuple[Path, Path, str] | None:
    """``True`` when a common source is in the same order on both sides, ``None`` when nothing is known; else the reorderings that
    differ, for the source with the fewest."""
    differing: list[tuple[Path, Path, str]] = []
    alike = False
    for base in {b.removeprefix(VIA) for b in x.paths} & {b.removeprefix(VIA) for b in y.paths}:
        weak = base not in x.paths or base not in y.paths
        a, b = x.paths.get(base, x.paths.get(VIA + base)), y.paths.get(base, y.paths.get(VIA + base))
        if a is None or b is None:
            continue
        if a == b and not weak:
            return True
        alike = alike or a == b
        if not weak:
            differing.append((*apart(a, b), base))
    if not differing:
        return True if alike else None
    return min(differing, key=lambda d: len(d[0]) + len(d[1]), default=None)


def apart(a: Path, b: Path) -> tuple[Path, Path]:
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return a, b


def labelish(e: ast.expr) -> bool:
    """Whether an expression goes by the name of a target."""
    while True:
        if isinstance(e, ast.Subscript | ast.Starred):
            e = e.value
        elif isinstance(e, ast.Attribute):
            if LABEL.search(e.attr):
                return True
            e = e.value
        elif isinstance(e, ast.Call):
            if isinstance(e.func, ast.Attribute) and call_name(e) not in ("tensor", "from_numpy", "as_tensor", "stack", "array", "asarray", "cat"):
                e = e.func.value
            elif e.args:
                e = e.args[0]
            else:
                return False
        elif isinstance(e, ast.ListComp | ast.GeneratorExp):
            e = e.elt
        elif isinstance(e, ast.Name):
            return bool(LABEL.search(e.id))
        else:
            return False
