from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import VALIDATION, roles
from osler.rules.script import around, below_function, call_name, calls, evaluation_block, function_around, place, words

SIZED = re.compile(r"^(len|size|shape|numel|sum|batch_size|bs|n|count|num_\w*|n_\w*)$")


@dataclass(frozen=True, slots=True)
class Bias:
    """What averaging per-batch means costs in one quantity, over several evaluations."""

    name: str
    plain: float
    weighted: float
    passes: int
    sizes: tuple[int, ...]

    @property
    def difference(self) -> float:
        return self.plain - self.weighted

    @property
    def relative(self) -> float:
        return abs(self.difference) / max(abs(self.weighted), 1e-12)


@rule("metric-unequal-batches", "evaluation")
def check(window: Window, *, relative: float = 0.05, absolute: float = 0.01, unequal: float = 0.5) -> Iterator[Finding]:
    """The validation figure is a mean of per-batch means over unequal batches.

    **What it is.** Each batch contributes its mean with the same weight, but the last batch is much smaller, so its rows
    count several times as much as all others.

    **How it is seen.** The validation batches are unequal (smallest below `unequal` times the largest), the code sums
    per-batch means and divides by the number of batches, and the figure so made differs from the row-weighted one by
    `relative` (loss) or `absolute` (accuracy), in the median over evaluations. Without the code's agreement, or below these
    effects, this is a note or nothing.

    **Why it matters.** One odd batch moves the figure that chooses the model.

    **What to do.** Multiply by the batch size and divide by the number of rows, or sum correct answers.

    **When this is wrong.** Where batches, not rows, are the unit on purpose (one query per batch).

    **Source.** torchmetrics documentation, "mean of means".
    """
    seen: set[tuple[str, int]] = set()
    for phase in window.facts("phase"):
        if phase.get("kind") != "validation" or phase.at is None:
            continue
        spots = [p for p in (phase.at, place(phase.get("begun_at"))) if p is not None and p.file == phase.at.file]
        adds = next((a for p in spots if (a := accumulation(window, p, evaluation_block(window, p)) or gathered(window, p)) is not None), None)
        if adds is None or (phase.at.file, adds[0].lineno) in seen:
            continue
        seen.add((phase.at.file, adds[0].lineno))
        for bias in biases(window, unequal):
            matters = abs(bias.difference) >= absolute if bias.name == "accuracy" else bias.relative >= relative
            if not matters:
                continue
            at = Location(phase.at.file, adds[0].lineno)
            yield Finding(
                "metric-unequal-batches", "measured", "harmful",
                f"Mean of batch means gives a validation {bias.name} of {bias.plain:.4g}; weighted by rows it is {bias.weighted:.4g}",
                "Weight each batch by its number of rows (total += value * len(x); divide by the number of rows).",
                Where.at(at, also=(f"{phase.at.file}:{adds[1].lineno}",) if adds[1].lineno != adds[0].lineno else ()),
                evidence=(Evidence(f"batches of {max(bias.sizes)} and {min(bias.sizes)} rows count alike; off by {bias.difference:+.3g} "
                                   f"(median over {bias.passes} evaluations)", "calls", bias.difference,
                                   absolute if bias.name == "accuracy" else relative, bias.passes),))
            return
        sizes = loader_sizes(window, unequal)
        if sizes and not biases(window, unequal):
            yield Finding(
                "metric-unequal-batches", "suspected", "harmful" if min(sizes) * 8 <= max(sizes) and len(sizes) <= 4 else "note",
                f"A mean of batch means over batches of {max(sizes)} and {min(sizes)} rows",
                "Weight each batch by its number of rows, or sum correct answers and divide by the number of rows.",
                Where.at(Location(phase.at.file, adds[0].lineno)),
                evidence=(Evidence(f"the last of {len(sizes)} validation batches holds {min(sizes)} rows and counts as much as one of {max(sizes)}: "
                                   f"{max(sizes) / min(sizes):.3g} times its share", "batches", max(sizes) / min(sizes), None, len(sizes)),))
            return


def biases(window: Window, unequal: float) -> list[Bias]:
    """Plain against row-weighted means of loss and accuracy of the validation calls, per evaluation (calls between two steps)."""
    rows = window.calls
    rows = rows[(rows["phase"] == 1) & (rows["batch"] > 0)]
    found = []
    complete = {p.get("first_step", p.step): int(p.get("criterion_calls") or 0) for p in window.facts("phase")}
    for criterion in np.unique(rows["criterion"]):
        own = rows[rows["criterion"] == criterion]
        for name, column in (("accuracy", "accuracy"), ("loss", "value")):
            pairs: list[tuple[float, float]] = []
            sizes: tuple[int, ...] = ()
            for step in np.unique(own["step"]):
                part = own[(own["step"] == step) & np.isfinite(own[column])]
                if len(part) > 1 and len(part) >= complete.get(int(step), 0) and part["batch"].min() <= unequal * part["batch"].max():
                    values, size = part[column].astype(float), part["batch"].astype(float)
                    pairs.append((float(values.mean()), float((values * size).sum() / size.sum())))
                    sizes = tuple(int(s) for s in part["batch"])
            if pairs:
                plain, weighted = np.array(pairs).T
                middle = int(np.argsort(plain - weighted)[len(pairs) // 2])
                found.append(Bias(name, float(plain[middle]), float(weighted[middle]), len(pairs), sizes))
    return found


def loader_sizes(window: Window, unequal: float) -> tuple[int, ...]:
    """Batch sizes of a validation loader whose last batch is small."""
    role = roles(window)
    for f in window.facts("loader-pass"):
        rows, first, last, n = (f.get(k) for k in ("rows", "first_size", "last_size", "batches"))
        if role.get(f.get("loader", -1)) == VALIDATION and isinstance(n, int) and n > 1 and first and last and 0 < last <= unequal * first \
                and rows == (n - 1) * first + last:
            return (int(first),) * (n - 1) + (int(last),)
    return ()


def accumulation(window: Window, at: Location, block: ast.stmt | None) -> tuple[ast.stmt, ast.expr] | None:
    """The statement that adds up per-batch means and the division by the number of batches; ``None`` if rows are weighted."""
    loops = [s for s in ast.walk(block) if isinstance(s, ast.For)] if block is not None else []
    loop = next((s for s in loops if s.lineno <= at.line <= (s.end_lineno or 0)), None)
    scope = function_around(around(window, at)) or next(iter(below_function(around(window, at))), None)
    if loop is None or scope is None:
        return None
    divides = [n for n in ast.walk(scope) if isinstance(n, ast.expr) and by_count(n, loop)]
    if not divides:
        return None
    for s in ast.walk(loop):
        value = s.value if isinstance(s, ast.AugAssign) and isinstance(s.op, ast.Add) else None
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and call_name(s.value) == "append" and s.value.args:
            value = s.value.args[0]
        if value is None or not isinstance(s, ast.stmt) or isinstance(value, ast.Constant):
            continue
        weighted = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) and any(SIZED.match(w) for w in words(n)) for n in ast.walk(value))
        summed = any(call_name(c) in ("sum", "len", "numel", "size") for c in calls(value)) and not any(
            isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div) for n in ast.walk(value)) and not list(calls(value, "mean"))
        reduced = any(k.arg == "reduction" and isinstance(k.value, ast.Constant) and k.value.value != "mean" for c in calls(value) for k in c.keywords)
        total = s.target if isinstance(s, ast.AugAssign) else s.value.func if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) else None
        names = words(total) if total is not None else set()
        used = [d for d in divides if names & words(d) - {"append"}]
        if not weighted and not summed and not reduced and used:
            return s, used[0]
    return None


def gathered(window: Window, at: Location) -> tuple[ast.stmt, ast.expr] | None:
    """Per-batch means gathered by a comprehension over the batches, and their plain mean: ``torch.stack([step(b) for b in loader]).mean()``."""
    scope: ast.AST | None = function_around(around(window, at)) or next(iter(below_function(around(window, at))), None)
    for statement in (s for s in ast.walk(scope) if isinstance(s, ast.Assign | ast.Return | ast.Expr)) if scope is not None else ():
        for node in ast.walk(statement):
            if not isinstance(node, ast.ListComp | ast.GeneratorExp) or len(node.generators) != 1 or (statement.end_lineno or 0) < at.line \
                    or isinstance(node.elt, ast.Tuple) or not any(True for _ in calls(node.elt)) or "range" in words(node.generators[0].iter) or any(call_name(c) in ("sum", "len", "numel", "size") for c in calls(node.elt)):
                continue
            names = {t.id for t in statement.targets if isinstance(t, ast.Name)} if isinstance(statement, ast.Assign) else set()
            for n in ast.walk(scope) if scope is not None else ():
                if isinstance(n, ast.expr) and (mean_of(n, node, set()) or (names and mean_of(n, None, names))):
                    return statement, n
    return None


def mean_of(node: ast.expr, made: ast.expr | None, names: set[str]) -> bool:
    """Whether an expression is the plain mean of a list, given as itself or by name."""
    def is_list(x: ast.AST | None) -> bool:
        return x is not None and (x is made or (isinstance(x, ast.Name) and x.id in names))

    def stacked(x: ast.AST) -> bool:
        return isinstance(x, ast.Call) and call_name(x) in ("stack", "tensor", "as_tensor", "array", "Tensor", "asarray") and bool(x.args) and is_list(x.args[0])

    if isinstance(node, ast.Call) and call_name(node) in ("mean", "fmean", "average") and not any(k.arg == "weights" for k in node.keywords):
        first = node.args[0] if node.args else None
        return is_list(first) or (first is not None and stacked(first)) or (isinstance(node.func, ast.Attribute) and stacked(node.func.value))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.left, ast.Call) and call_name(node.left) == "sum" and node.left.args:
        counts = isinstance(node.right, ast.Call) and call_name(node.right) == "len" and bool(node.right.args) and not {"dataset"} & words(node.right)
        return is_list(node.left.args[0]) and counts
    return False


def by_count(node: ast.AST, loop: ast.For) -> bool:
    """A division by the number of batches, or the mean of a list."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        lens = [c for c in calls(node.right, "len") if c.args]
        iterated = words(loop.iter) - {"enumerate", "tqdm"}
        lists = [c for c in lens if words(c.args[0]) <= words(node.left)]
        counters = {t.id for s in loop.body if isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name) and isinstance(s.value, ast.Constant)
                    and s.value.value == 1 for t in [s.target]}
        return any(words(c.args[0]) & iterated and "dataset" not in words(c.args[0]) for c in lens) or bool(lists) or \
            (isinstance(node.right, ast.Name) and node.right.id in counters)
    if isinstance(node, ast.Call) and call_name(node) == "mean" and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
        inner = node.func.value
        return call_name(inner) in ("stack", "tensor", "as_tensor", "array", "Tensor") and bool(inner.args) and isinstance(inner.args[0], ast.Name)
    return isinstance(node, ast.Call) and call_name(node) in ("mean", "fmean", "average") and len(node.args) == 1 and isinstance(node.args[0], ast.Name) and not any(k.arg == "weights" for k in node.keywords)
