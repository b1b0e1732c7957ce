"""Which loader feeds training and which validation, told by what happened: steps advance between the batches of a training pass."""

from __future__ import annotations

import ast
import re

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.script import call_name, calls, origin, root, targets, tree

TRAIN, VALIDATION = "train", "validation"
SAYS_TRAIN = re.compile(r"(^|_)(tr|trn|train|training|fit)(_|$|\d|loader|set|data|ds|dl)", re.I)
SAYS_VALIDATION = re.compile(r"(^|_)(va|val|vl|valid|validation|test|te|tst|dev|eval|hold|holdout|query|gallery)(_|$|\d|loader|set|data|ds|dl)", re.I)


def loaders(window: Window) -> dict[int, Fact]:
    """Newest fact of each loader."""
    return {int(f["index"]): f for f in window.facts("loader") if isinstance(f.get("index"), int)}


def roles(window: Window) -> dict[int, str]:
    """Loader index to ``train`` or ``validation``, by the majority of its passes; the grad mode decides for one-batch passes.

    A loader that never served a batch has no role.
    """
    rows = window.stream("batches")
    rows = rows[rows["loader"] >= 0]
    passes = window.facts("loader-pass")
    found: dict[int, str] = {}
    for index in np.unique(rows["loader"]):
        own = rows[rows["loader"] == index]
        votes = []
        for number in np.unique(own["pass_"]):
            part = own[own["pass_"] == number]
            if len(part) > 1:
                votes.append(bool((np.diff(part["step"]) > 0).mean() > 0.2))
            else:
                after = int(rows["step"].max()) if len(rows) else 0
                votes.append(bool(part["phase"][0] == 0 and after > part["step"][0]))
        found[int(index)] = TRAIN if np.mean(votes) > 0.5 or whole_batches(rows, own) else VALIDATION
    for f in passes:
        index = f.get("loader")
        if isinstance(index, int) and index not in found and f.get("batches"):
            found[index] = VALIDATION if f.get("phase") in (1, VALIDATION) else TRAIN
    return found


def whole_batches(rows: np.ndarray, own: np.ndarray, early: int = 4) -> bool:
    """A training loader whose passes are one batch each: fetched while the validation before it still counts as open, but a step
    is taken before any other batch is fetched."""
    if len(np.unique(own["pass_"])) < max(2, len(own)) or own["phase"][0] != 0:
        return False
    places = np.flatnonzero(rows["loader"] == own["loader"][0])[:early]
    following = [bool(rows["step"][i + 1] > rows["step"][i]) for i in places if i + 1 < len(rows)]
    return len(following) >= 2 and all(following)


def construction(window: Window, loader: Fact) -> ast.Call | None:
    """The ``DataLoader(...)`` call of a loader in the script's text."""
    at = loader.at
    if at is None:
        return None
    made = [c for c in calls(tree(window, at.file)) if c.lineno <= at.line <= (c.end_lineno or c.lineno)
            and call_name(c).lower().endswith("loader")]
    nearest = [c for c in made if abs(c.lineno - at.line) == min(abs(m.lineno - at.line) for m in made)]
    here = sorted(i for i, f in loaders(window).items() if f.at is not None and (f.at.file, f.at.line) == (at.file, at.line))
    if len(nearest) == len(here) > 1:  # several on one line: made from left to right
        return sorted(nearest, key=lambda c: (c.lineno, c.col_offset))[here.index(int(loader["index"]))]
    return nearest[0] if nearest else None


def dataset_argument(window: Window, loader: Fact) -> ast.expr | None:
    call = construction(window, loader)
    if call is None:
        return None
    return next((k.value for k in call.keywords if k.arg == "dataset"), call.args[0] if call.args else None)


def dataset_line(window: Window, loader: Fact) -> Location | None:
    """Where the loader's data set was made; the loader's own line where that cannot be told."""
    name = root(dataset_argument(window, loader))
    found = origin(window, loader.at, name) if name and loader.at is not None else None
    return Location(loader.at.file, found.lineno) if found is not None and loader.at is not None else loader.at


def loader_name(window: Window, loader: Fact) -> str:
    """Name of the variable (or function) that holds the loader, as far as the text tells."""
    call = construction(window, loader)
    if call is None or loader.at is None:
        return ""
    module = tree(window, loader.at.file)
    holders = [n for n in ast.walk(module) if isinstance(n, ast.Assign) and any(c is call for c in ast.walk(n))] if module is not None else []
    for statement in holders:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for t, v in zip(target.elts, value.elts, strict=True):
                if any(c is call for c in ast.walk(v)):
                    return root(t) or ""
        return next(iter(targets(statement)), "") if len(targets(statement)) == 1 else ""
    return loader.at.function


def batch_figures(window: Window, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the inputs of a loader's batches [batches], finite ones of at least 4 rows."""
    rows = window.stream("batches")
    rows = rows[(rows["loader"] == index) & np.isfinite(rows["mean"]) & np.isfinite(rows["std"]) & (rows["size"] >= 4)]
    return rows["mean"].astype(float), rows["std"].astype(float)
