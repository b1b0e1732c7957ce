"""Questions to the text of the user's script: what encloses a line, where a name got its value, which calls a block makes.

Standard library only, and nothing is executed. A file that was not kept or does not parse answers with nothing, so a rule must
have a fallback; text supports a fact or places it, it is no observation itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from osler.core.facts import Location
from osler.core.window import Window

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While | ast.AsyncFor
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.While, ast.AsyncFor)
TRAINING_CALLS = frozenset(("backward", "step", "manual_backward", "optimizer_step", "zero_grad"))


@lru_cache(maxsize=64)
def parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def tree(window: Window, file: str | None) -> ast.Module | None:
    text = window.sources.get(file or "")
    return parse(text) if text else None


def place(raw: Any) -> Location | None:
    """A location as facts carry it inside their data: ``[file, line, function]`` or ``file:line``."""
    if isinstance(raw, Location):
        return raw
    if isinstance(raw, str) and re.search(r":\d+$", raw):
        file, _, line = raw.rpartition(":")
        return Location(file, int(line))
    return Location.from_json(raw)


def _blocks(node: ast.AST) -> Iterator[ast.stmt]:
    for _, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else ():
            if isinstance(item, ast.stmt):
                yield item
            elif isinstance(item, ast.ExceptHandler | ast.match_case):
                yield from _blocks(item)


def around(window: Window, at: Location | None) -> list[ast.stmt]:
    """Statements that contain a line, outermost first."""
    here: ast.AST | None = tree(window, at.file) if at is not None else None
    found: list[ast.stmt] = []
    while here is not None and at is not None:
        inner = next((s for s in _blocks(here) if s.lineno <= at.line <= (s.end_lineno or s.lineno)), None)
        if inner is not None:
            found.append(inner)
        here = inner
    return found


def function_around(statements: list[ast.stmt]) -> Function | None:
    return next((s for s in reversed(statements) if isinstance(s, FUNCTIONS)), None)


def below_function(statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements inside the innermost function (or of the module), outermost first."""
    cut = max((i for i, s in enumerate(statements) if isinstance(s, (*FUNCTIONS, ast.ClassDef))), default=-1)
    return statements[cut + 1:]


def call_name(call: ast.Call) -> str:
    """Last part of what is called: ``mean`` for ``x.pow(2).mean()``."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def calls(node: ast.AST | None, *names: str) -> Iterator[ast.Call]:
    for n in ast.walk(node) if node is not None else ():
        if isinstance(n, ast.Call) and (not names or call_name(n) in names):
            yield n


def trains(node: ast.AST, more: frozenset[str] = frozenset()) -> bool:
    """Whether the block holds a backward pass or an optimizer step, or a call of a function in ``more``."""
    return any(call_name(c) in TRAINING_CALLS or call_name(c) in more for c in calls(node))


@lru_cache(maxsize=64)
def _training_functions(text: str) -> frozenset[str]:
    module = parse(text)
    functions = [n for n in ast.walk(module) if isinstance(n, FUNCTIONS)] if module is not None else []
    found: frozenset[str] = frozenset()
    for _ in range(4):
        more = frozenset(f.name for f in functions if trains(f, found))
        if more == found:
            break
        found = more
    return found


def training_functions(window: Window, file: str) -> frozenset[str]:
    """Names of the user's functions that train, directly or through another one."""
    return _training_functions(window.sources.get(file, ""))


def words(node: ast.AST) -> set[str]:
    """Every identifier that occurs: names, attributes, parameters, keywords."""
    found: set[str] = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            found.add(n.id)
        elif isinstance(n, ast.Attribute):
            found.add(n.attr)
        elif isinstance(n, ast.arg | ast.keyword):
            found.add(n.arg or "**")
        elif isinstance(n, FUNCTIONS):
            found.add(n.name)
    return found


def dotted(node: ast.AST) -> str | None:
    """``x`` or ``self.x``; ``None`` for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


def root(node: ast.AST | None) -> str | None:
    """The variable an expression is made of: ``x`` for ``x[b].float()``, ``TensorDataset(x, y)`` or ``x / 16``."""
    while node is not None:
        name = dotted(node)
        if name is not None and (isinstance(node, ast.Name) or name.startswith("self.")):
            return name
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and root(node.func.value) not in (None, "torch", "np", "F", "nn", "data", "utils")
            node = node.func.value if method and isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
        elif isinstance(node, ast.Tuple | ast.List) and node.elts:
            node = node.elts[0]
        else:
            return None
    return None


def targets(statement: ast.stmt) -> set[str]:
    """Names that a statement itself binds."""
    if isinstance(statement, ast.Assign):
        nodes: list[ast.expr] = list(statement.targets)
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        nodes = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        nodes = [i.optional_vars for i in statement.items if i.optional_vars is not None]
    else:
        return set()
    flat: list[ast.AST] = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Tuple | ast.List):
            nodes.extend(node.elts)
        else:
            flat.append(node.value if isinstance(node, ast.Starred | ast.Subscript) else node)
    return {name for name in map(dotted, flat) if name is not None}


def bound(node: ast.AST) -> set[str]:
    """Names bound anywhere inside a block, loop variables included."""
    found: set[str] = set()
    for n in ast.walk(node):
        if isinstance(n, ast.stmt):
            found |= targets(n)
        elif isinstance(n, ast.comprehension):
            found |= {x.id for x in ast.walk(n.target) if isinstance(x, ast.Name)}
    return found


def assignment(window: Window, file: str, name: str, before: int) -> ast.stmt | None:
    """The last statement above a line that binds ``name`` (or, for code in functions, the last one anywhere)."""
    module = tree(window, file)
    found = [n for n in ast.walk(module) if isinstance(n, ast.stmt) and name in targets(n)] if module is not None else []
    found.sort(key=lambda s: s.lineno)
    above = [s for s in found if s.lineno < before]
    return above[-1] if above else found[-1] if found else None


def origin(window: Window, at: Location, name: str, depth: int = 3) -> ast.stmt | None:
    """Where a name used at a line got its value, through parameters of the user's own functions."""
    function = function_around(around(window, at))
    parameters = [a.arg for a in function.args.args] if function is not None else []
    if function is not None and name in parameters and depth > 0:
        position = parameters.index(name) - (parameters[0] == "self")
        for call in calls(tree(window, at.file), function.name):
            given = next((k.value for k in call.keywords if k.arg == name), None)
            given = given if given is not None else call.args[position] if position < len(call.args) else None
            inner = root(given)
            if inner is not None:
                return origin(window, Location(at.file, call.lineno), inner, depth - 1)
        return None
    found = assignment(window, at.file, name, at.line)
    if isinstance(found, LOOPS) and isinstance(found, ast.For) and depth > 0:
        inner = root(found.iter)
        return (origin(window, Location(at.file, found.lineno), inner, depth - 1) if inner else None) or found
    return found


def function_named(window: Window, file: str, name: str) -> Function | None:
    module = tree(window, file)
    return next((n for n in ast.walk(module) if isinstance(n, FUNCTIONS) and n.name == name), None) if module is not None else None


def constant(window: Window, file: str, node: ast.AST | None, before: int = 10**9) -> Any:
    """Value of a literal, or of a name that was bound to one; ``None`` if it is neither."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(window, file, node.operand, before)
        return -value if isinstance(value, int | float) else None
    if isinstance(node, ast.Call) and call_name(node) == "float" and node.args:
        value = constant(window, file, node.args[0], before)
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
    if isinstance(node, ast.Attribute) and node.attr == "inf":
        return float("inf")
    if isinstance(node, ast.Name):
        found = assignment(window, file, node.id, before)
        if isinstance(found, ast.Assign) and len(found.targets) == 1:
            target = found.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(found.value, ast.Tuple) and len(target.elts) == len(found.value.elts):
                pairs = {t.id: v for t, v in zip(target.elts, found.value.elts, strict=True) if isinstance(t, ast.Name)}
                return constant(window, file, pairs.get(node.id), found.lineno)
            return constant(window, file, found.value, found.lineno)
    return None


def loop_heads(window: Window, at: Location | None) -> list[Loop]:
    """Loops of the same function that contain a line, outermost first."""
    return [s for s in below_function(around(window, at)) if isinstance(s, LOOPS)]


def no_grad(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.With) and any(
        isinstance(i.context_expr, ast.Call) and call_name(i.context_expr) in ("no_grad", "inference_mode", "set_grad_enabled")
        for i in statement.items)


def evaluation_block(window: Window, at: Location) -> ast.stmt | None:
    """The widest statement around a line that trains nothing: an evaluation function, a ``with no_grad`` or loop, the statement itself."""
    statements = around(window, at)
    function, training = function_around(statements), training_functions(window, at.file)
    if function is not None and function.name not in training:
        return function
    inner = below_function(statements)
    quiet = [s for s in inner if not trains(s, training) and not isinstance(s, ast.If)]
    return quiet[0] if quiet else inner[-1] if inner else None


def repeats_same_input(window: Window, at: Location) -> bool:
    """Whether the call at this line is made several times on one unchanged input (Monte-Carlo dropout, test-time augmentation)."""
    statements = below_function(around(window, at))
    if not statements:
        return False
    for comprehension in ast.walk(statements[-1]):
        if isinstance(comprehension, ast.ListComp | ast.GeneratorExp) and _over_range(comprehension.generators[0].iter):
            names = {n.id for n in ast.walk(comprehension.generators[0].target) if isinstance(n, ast.Name)}
            if comprehension.lineno <= at.line <= (comprehension.end_lineno or 0) and not names & words(comprehension.elt):
                return True
    training = training_functions(window, at.file)
    for loop in statements:
        if isinstance(loop, ast.For) and _over_range(loop.iter) and not trains(loop, training):
            inside = bound(loop)
            used = [words(a) for s in statements[-1:] for c in calls(s) for a in c.args]
            if used and not any(u & inside for u in used):
                return True
    return False


def _over_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and call_name(node) == "range"
