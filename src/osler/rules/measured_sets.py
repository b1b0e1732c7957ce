"""What a script calls the set it measures: validation rows, or the training rows themselves on purpose.

Names decide, first those of the loader (or of what a function that makes it is bound to), then those of its data; the same object
under a name that says nothing is the training set measured. Thresholds and findings are not in here.
"""

from __future__ import annotations

import ast
import re

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.loaders import SAYS_TRAIN, SAYS_VALIDATION, construction, dataset_argument, loader_name, loaders
from osler.rules.script import FUNCTIONS, call_name, calls, root, targets, tree, words

VALIDATION_NAME = re.compile(r"[xX](va|val|te|test|valid|dev)(?![a-z])|(^|[^a-zA-Z])(va|val|te|test|valid|dev)[xX_]")
VAGUE = re.compile(r"(^|_)eval(_|$|\d|loader|set|data|ds|dl)", re.I)
GRID = frozenset(("linspace", "meshgrid", "mgrid", "arange", "cartesian_prod", "logspace"))


def said(name: str) -> str:
    """``train``, ``validation`` or nothing; ``eval`` alone says how, not on what."""
    if SAYS_TRAIN.search(name):
        return "train"
    rest = VAGUE.sub("_", name)
    return "validation" if SAYS_VALIDATION.search(rest) or VALIDATION_NAME.search(rest) else ""


def meant(window: Window, index: int, training: list[int]) -> str:
    """``train``: measures the training set by name; ``validation``: named for it; ``same``: the training loader's data under a name
    that says nothing; ``unknown``: other data under such a name."""
    known = loaders(window)
    loader = known[index]
    names = [loader_name(window, loader), *made_for(window, loader)]
    data = dataset_argument(window, loader)
    inside = sorted(words(data)) + [str(n.value) for n in ast.walk(data) if isinstance(n, ast.Constant) and isinstance(n.value, str)] if data is not None else []
    for group in (names, inside):
        told = {said(n) for n in group} - {""}
        if told:
            return "train" if "train" in told else "validation"
    source = root(data)
    same = any(known[t].get("same_data") is not None and known[t].get("same_data") == loader.get("same_data") for t in training if t in known) \
        or (source is not None and any(root(dataset_argument(window, known[t])) == source for t in training if t in known))
    return "same" if same else "unknown"


def made_for(window: Window, loader: Fact) -> list[str]:
    """Names that a loader gets elsewhere: key of a mapping, or what the call of the function that makes it is bound to."""
    call, at = construction(window, loader), loader.at
    module = tree(window, at.file) if at is not None else None
    if call is None or at is None or module is None:
        return []
    keys = [str(k.value) for d in ast.walk(module) if isinstance(d, ast.Dict) for k, v in zip(d.keys, d.values, strict=True)
            if isinstance(k, ast.Constant) and any(n is call for n in ast.walk(v))]
    maker = next((f for f in ast.walk(module) if isinstance(f, FUNCTIONS) and f.name == at.function and f.lineno <= call.lineno <= (f.end_lineno or 0)), None)
    if keys or maker is None:
        return keys
    bound = [s for s in ast.walk(module) if isinstance(s, ast.Assign) and any(True for _ in calls(s.value, maker.name)) and len(targets(s)) == 1]
    here = sorted(i for i, f in loaders(window).items() if f.at is not None and (f.at.file, f.at.line) == (at.file, at.line))
    bound.sort(key=lambda s: s.lineno)
    place = here.index(int(loader["index"])) if int(loader["index"]) in here else -1
    return [next(iter(targets(bound[place])))] if len(bound) == len(here) and place >= 0 else []


def defined(window: Window, name: str) -> tuple[Location, ast.stmt] | None:
    """The last statement that makes ``name`` (its part behind the last dot) out of others than itself."""
    own, found = name.split(".")[-1], None
    for file in window.sources:
        for node in ast.walk(tree(window, file) or ast.Module([], [])):
            if isinstance(node, ast.Assign) and any(own == t.split(".")[-1] for t in targets(node)) and own not in words(node.value):
                found = Location(file, node.lineno), node
    return found


def cut_line(window: Window, name: str) -> Location | None:
    """Where the rows of ``name`` were chosen: its definition, or that of the index in it."""
    made = defined(window, name)
    for _ in range(2):
        index = next((n.slice.id for n in ast.walk(made[1]) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Name)
                      and said(n.slice.id) == "validation"), None) if made is not None else None
        further = defined(window, index) if index is not None else None
        if further is None:
            break
        made = further
    return made[0] if made is not None else None


def on_a_grid(statement: ast.stmt | None) -> bool:
    """Made of evenly spaced points: two such tables are equal by construction, and a function is drawn on one."""
    return statement is not None and any(call_name(c) in GRID for c in calls(statement))
