"""A target that is the sum of columns which stay among the inputs."""

from __future__ import annotations

import ast

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.window import Window
from osler.rules.script import call_name, parse, targets


def parts_of_target(window: Window) -> Finding | None:
    """The target is the sum of columns that the choice of features by exclusion leaves in (``[c for c in frame.columns if c != "total"]``)."""
    for file, text in window.sources.items():
        module = parse(text)
        if module is None or (".columns" not in text and "drop(" not in text):
            continue
        sums = {name: parts for name, value in columns_made(module) if len(parts := summands(value)) >= 2}
        made = dict(columns_made(module)) | {t: n.value for n in ast.walk(module) if isinstance(n, ast.Assign) for t in targets(n)}
        for choice in ast.walk(module):
            if isinstance(choice, ast.ListComp) and any(isinstance(n, ast.Attribute) and n.attr == "columns" for g in choice.generators for n in ast.walk(g.iter)):
                left_out: set[str] = {w for g in choice.generators for t in g.ifs for w in spoken(t, module)}
            elif isinstance(choice, ast.Call) and call_name(choice) == "drop" and isinstance(choice.func, ast.Attribute):
                left_out = {w for a in [*choice.args, *(k.value for k in choice.keywords)] for w in spoken(a, module)}
            else:
                continue
            for goal in left_out & set(sums):
                parts = sums[goal]
                drawn = [p for p in parts if p in made and not mentioned(made[p]) & (set(made) - parts)]
                if not parts & left_out and not drawn:
                    return Finding("target-leak-feature", "certain", "harmful", f"The target {goal!r} is the sum of inputs: {' + '.join(sorted(parts))}", f"Leave out {', '.join(sorted(parts))}: they are known only with the target.",
                                   Where.at(Location(file, choice.lineno), columns=tuple(sorted(parts))),
                                   evidence=(Evidence(f"line {choice.lineno} leaves {goal!r} out of the inputs and keeps what it is the sum of", "source", None, None, 1),))
    return None


def mentioned(node: ast.expr) -> set[object]:
    return {n.id if isinstance(n, ast.Name) else n.value for n in ast.walk(node) if isinstance(n, ast.Name | ast.Constant)}


def columns_made(module: ast.Module) -> list[tuple[str, ast.expr]]:
    """Columns of frames and what they hold: keywords and keys of ``DataFrame(dict(...))``, ``frame["name"] = ...``."""
    found: list[tuple[str, ast.expr]] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and isinstance(node.targets[0].slice, ast.Constant) and isinstance(node.targets[0].slice.value, str):
            found.append((node.targets[0].slice.value, node.value))
        elif isinstance(node, ast.Call) and call_name(node) in ("dict", "assign", "DataFrame"):
            found += [(k.arg, k.value) for k in node.keywords if k.arg]
        elif isinstance(node, ast.Dict):
            found += [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant) and isinstance(k.value, str)]
    return found


def summands(node: ast.expr) -> set[str]:
    """Columns or names of a plain sum; empty for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = summands(node.left), summands(node.right)
        return left | right if left and right else set()
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return {node.attr}
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return {node.slice.value}
    return set()


def spoken(node: ast.AST, module: ast.Module) -> set[str]:
    """Texts in an expression, also those of names that are bound to them."""
    found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for statement in module.body:
        if isinstance(statement, ast.Assign) and set(targets(statement)) & names and isinstance(statement.value, ast.Constant | ast.List | ast.Tuple | ast.Set):
            found |= {n.value for n in ast.walk(statement.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found
