"""Random geometric changes of an image that its mask, boxes or key points do not go through, told from the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, call_name, dotted, tree

GEOMETRIC = frozenset(("flip", "fliplr", "flipud", "hflip", "vflip", "rot90", "rotate", "roll", "transpose", "crop", "affine", "warp", "shift", "permute", "resized_crop", "perspective"))
SPATIAL = re.compile(r"mask|(^|_)seg|heat_?map|key_?point|box|depth|flow|contour|landmark|(^|_)gt(_|$)", re.I)
CHANCE = frozenset(("random", "rand", "uniform", "randint", "choice", "randrange", "bernoulli", "integers", "normal"))


def draws(node: ast.AST) -> bool:
    return any(isinstance(c, ast.Call) and call_name(c) in CHANCE for c in ast.walk(node))


def moved(statements: list[ast.stmt]) -> dict[str, int]:
    """Variables that a block replaces by a geometric change of themselves, with the line."""
    found: dict[str, int] = {}
    for s in statements:
        for n in ast.walk(s):
            if not isinstance(n, ast.Assign):
                continue
            pairs: list[tuple[ast.expr, ast.expr]] = [(n.targets[0], n.value)]
            if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple):
                pairs = list(zip(n.targets[0].elts, n.value.elts, strict=False))
            for target, value in pairs:
                changes = any(isinstance(c, ast.Call) and call_name(c) in GEOMETRIC for c in ast.walk(value)) or any(
                    isinstance(c, ast.Slice) and isinstance(c.step, ast.UnaryOp) for c in ast.walk(value))
                names = [dotted(t) for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
                inside = {dotted(c) for c in ast.walk(value) if isinstance(c, ast.Name | ast.Attribute)}
                for name in names:
                    if name is not None and changes and name in inside:
                        found[name] = n.lineno
    return found


def unpaired(window: Window) -> Iterator[tuple[Location, str, str]]:
    """(line, image, mask): a function that returns both changes one of them under a random condition, and never the other under the same."""
    for file in window.sources:
        module = tree(window, file)
        for f in ast.walk(module) if module is not None else ():
            if not isinstance(f, FUNCTIONS):
                continue
            handed = [dotted(e) or dotted(e.func.value) if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) else dotted(e)
                      for r in ast.walk(f) if isinstance(r, ast.Return | ast.Yield) and isinstance(r.value, ast.Tuple) for e in r.value.elts]
            names = [h for h in handed if h]
            masks = [n for n in names if SPATIAL.search(n)]
            images = [n for n in names if n not in masks]
            if not masks or not images:
                continue
            drawn = {t.id for n in ast.walk(f) if isinstance(n, ast.Assign) and draws(n.value) for t in n.targets if isinstance(t, ast.Name)}
            by: dict[str, list[dict[str, int]]] = {}
            for n in ast.walk(f):
                if isinstance(n, ast.If) and (draws(n.test) or {x.id for x in ast.walk(n.test) if isinstance(x, ast.Name)} & drawn):
                    key = f"draw {n.lineno}" if draws(n.test) else ast.unparse(n.test)
                    by.setdefault(key, []).append(moved(n.body))
            for changes in by.values():
                together = {k: v for part in changes for k, v in part.items()}
                one, other = [n for n in images if n in together], [m for m in masks if m in together]
                if bool(one) != bool(other):
                    changed = (one or other)[0]
                    yield Location(file, together[changed]), changed, (masks if one else images)[0]
                    return
