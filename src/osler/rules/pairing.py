"""What the run tells of the pairing of training inputs and targets: the facts of ``label-dependence`` and ``token-shift``, and the
lines of the script where rows part ways."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.loaders import VALIDATION, roles
from osler.rules.order_steps import LABEL, Mismatch, labelish
from osler.rules.row_order import mismatches
from osler.rules.script import FUNCTIONS, around, call_name, dotted, parse, place, tree

ON_PURPOSE = re.compile(r"random(ised|ized|ly)?_?lab|rand_?lab|lab\w*_?random|shuffled?_?lab|permut\w*_?(lab|test|y\b)|(lab|y)\w*_?(permuted|null)\b|null_?(model|lab|dist)|memori[sz]|"
                        r"sanity|scrambl|noise_?robust|robust\w*_?to|noisy_?lab|label_?noise|co_?teaching|forward_?correct|transition_?matrix|mixup|cutmix|negative", re.I)


@dataclass(frozen=True, slots=True)
class Dependence:
    """Scores of one set of training rows; ``None`` where something was not measured.

    Attributes:
        score, null, spread, z: of the pairs the run uses, against pairs in random order.
        used: the rows are the pairs the loss got; false where the targets of the batch were others than those of its rows.
        better, how, gain: score of the best other pairing, which one, and how many spreads it lies above random pairs.
    """

    fact: Fact
    score: float
    null: float
    spread: float
    z: float
    used: bool
    better: float
    how: str
    better_z: float

    @property
    def independent(self) -> bool:
        """The targets cannot be told from the inputs: no more than chance, by a test that would see a tenth of the possible."""
        return self.z < 4.0 and self.score - self.null < 0.12

    @property
    def room(self) -> float:
        """How much of the way from chance to certainty another pairing goes."""
        return (self.better - self.null) / max(1.0 - self.null, 1e-6)


def dependence(window: Window) -> Dependence | None:
    """The newest measurement on the training rows."""
    for fact in reversed(window.facts("experiment")):
        if fact.get("name") != "label-dependence" or fact.get("score") is None:
            continue
        score, null, spread, z = (float(fact.get(k) or 0.0) for k in ("score", "null", "spread", "z"))
        paired = fact.get("paired")
        used = int(fact.get("loader", -1)) >= 0 or paired is None or float(paired) > 0.9
        kept = fact.get("kept")
        if kept is not None and float(kept) < 0.6:
            return Dependence(fact, float(kept), null if fact.get("classes") else 0.0, spread, 0.0, False, score, "rows", z)
        if not used:
            return Dependence(fact, float(paired or 0.0), float(fact.get("chance") or 0.0), spread, 0.0, False, score, "rows", z)
        options = [(float(fact.get("shift_score") or -1.0), float(fact.get("shift_z") or 0.0), f"shift {fact.get('shift')}"),
                   (float(fact.get("repair_score") or -1.0), float(fact.get("repair_z") or 0.0), f"order {fact.get('repair')}")]
        better, better_z, how = max(options)
        return Dependence(fact, score, null, spread, z, True, better, how, better_z)
    return None


@lru_cache(maxsize=64)
def _mismatches(text: str) -> tuple[Mismatch, ...]:
    module = parse(text)
    return tuple(mismatches(module)) if module is not None else ()


def parted(window: Window) -> Iterator[tuple[str, Mismatch]]:
    """Every pair of input and target in the user's files whose rows were ordered differently, by file."""
    for file, text in window.sources.items():
        for found in _mismatches(text):
            yield file, found


MEANT = re.compile(r"random(ised|ized|ly)?[_ ]?lab|rand_?lab|permut\w*[_ ]?(lab|test|target)|lab\w*_?permuted|null[_ ]?(model|dist)|memori[sz]|sanity|scrambl|shuffled?[_ ]?lab", re.I)


def deliberate(window: Window) -> bool:
    """Names or texts anywhere in the script that speak of labels without meaning: a memorisation test, a permutation test."""
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            text = n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else n.name if isinstance(n, ast.FunctionDef) else \
                n.value if isinstance(n, ast.Constant) and isinstance(n.value, str) else ""
            if text and MEANT.search(text):
                return True
    return False


FORECAST = re.compile(r"next|futur|horizon|forecast|(^|_)lag|ahead|series|return", re.I)


def forecasts(window: Window, dep: Dependence, alike: float = 0.1) -> bool:
    """Rows that follow one another in time, or names that speak of the future: a target from another row is then the task."""
    if float(dep.fact.get("neighbours") or 0.0) > alike:
        return True
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            name = n.id if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) else n.name if isinstance(n, ast.FunctionDef | ast.ClassDef) else ""
            if name and FORECAST.search(name):
                return True
    return False


def on_purpose(window: Window, file: str, lines: tuple[int, ...] = ()) -> bool:
    """Words near the lines (or, without lines, anywhere in the names of the file) that say wrong pairs are wanted."""
    module = tree(window, file)
    if module is None:
        return False
    if lines:
        scopes: list[ast.AST] = []
        for n in lines:
            inside = around(window, Location(file, n))
            scopes += [s for s in inside if isinstance(s, FUNCTIONS)][-1:] or inside[-1:]
    else:
        scopes = [module]
    names = {n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else n.name for s in scopes for n in ast.walk(s)
             if isinstance(n, ast.Name | ast.Attribute | ast.FunctionDef | ast.ClassDef)}
    return any(ON_PURPOSE.search(n) for n in names)


def chance_level(window: Window) -> float:
    """Share of the most frequent label among the rows seen, 0 where there are none."""
    rows = window.stream("rows")
    known = rows[rows["label"] >= 0]["label"]
    return float(np.unique(known, return_counts=True)[1].max() / len(known)) if len(known) > 20 else 0.0


def learned(window: Window, least: float = 0.15) -> bool:
    """Validation accuracy well above chance: then the labels do belong to the inputs."""
    calls = window.calls
    judged = calls[(calls["phase"] == 1) & np.isfinite(calls["accuracy"])]
    if len(judged) < 2:
        return False
    late = float(np.median(judged["accuracy"][-max(3, len(judged) // 4):]))
    classes = max((int(f.get("target_classes") or 0) for f in window.facts("criterion")), default=0)
    base = max(chance_level(window), 1 / classes if classes > 1 else 0.5)
    return late > base + least * (1 - base) + 0.05


def dataset_pair_line(window: Window, dep: Dependence) -> Location | None:
    """The line of the training data set's ``__getitem__`` that reads the target; else where the loader's targets are cut out."""
    index = dep.fact.get("loader")
    for fact in window.facts("loader"):
        if fact.get("index") == index:
            item = place(fact.get("dataset_at"))
            found = _reads_target(window, item) if item is not None else None
            return found or item or fact.at
    return None


def _reads_target(window: Window, item: Location) -> Location | None:
    inside = around(window, item)
    function = next((s for s in inside if isinstance(s, FUNCTIONS)), None)
    if function is None:
        return None
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and labelish(node.value):
            return Location(item.file, node.lineno)
    last = [n for n in ast.walk(function) if isinstance(n, ast.Return)]
    return Location(item.file, last[-1].lineno) if last else None


def offset_line(window: Window) -> Location | None:
    """Targets that are cut, rolled or indexed at an offset: ``y[1:]``, ``np.roll(y, 1)``, ``labels[i + 1]``."""
    for file in window.sources:
        module = tree(window, file)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, ast.Call) and call_name(node) == "roll" and any(labelish(a) for a in [*node.args[:1], node.func]):
                return Location(file, node.lineno)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and labelish(node.value):
                s = node.slice
                moved = isinstance(s, ast.BinOp) and isinstance(s.op, ast.Add | ast.Sub) and isinstance(s.right, ast.Constant | ast.Attribute | ast.Name)
                cut = isinstance(s, ast.Slice) and isinstance(s.lower, ast.Constant) and s.lower.value in (1, 2, 3)
                if moved or cut:
                    return Location(file, node.lineno)
    return None


def uses_of(window: Window, name: str) -> Location | None:
    """Where rows are taken in the order ``name``."""
    for file in window.sources:
        module = tree(window, file)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, ast.Subscript) and dotted(node.slice) == name and isinstance(node.ctx, ast.Load):
                return Location(file, node.lineno)
    return None


def judged_by_loader(window: Window) -> bool:
    return VALIDATION in roles(window).values()


def target_name(name: str) -> bool:
    return bool(LABEL.search(name))
