"""Where the value of an argument was decided: the literal in the call, the constant above, the default, the option, the field.

Answers about text only (standard library, nothing is executed); a place that cannot be told is the call itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, around, assignment, call_name, calls, function_around, tree


def call_at(window: Window, at: Location | None, *names: str) -> ast.Call | None:
    """The call of one of ``names`` (any call without names) that spans a line, the innermost one."""
    if at is None:
        return None
    found = [c for c in calls(tree(window, at.file), *names) if c.lineno <= at.line <= (c.end_lineno or c.lineno)]
    return min(found, key=lambda c: (c.end_lineno or c.lineno) - c.lineno, default=None)


def argument(call: ast.Call | None, name: str, position: int | None = None) -> ast.expr | None:
    """The expression given for a parameter, by keyword or position."""
    if call is None:
        return None
    named = next((k.value for k in call.keywords if k.arg == name), None)
    if named is not None or position is None or position >= len(call.args):
        return named
    return call.args[position] if not isinstance(call.args[position], ast.Starred) else None


def decided(window: Window, at: Location, value: ast.expr | None, depth: int = 4) -> Location:
    """The line to change if this argument of the call at ``at`` is wrong."""
    if value is None:
        return at
    if depth <= 0 or isinstance(value, ast.Constant):
        return Location(at.file, value.lineno, at.function)
    inner = single(value)
    if isinstance(inner, ast.Name):
        return _name(window, at, inner, depth) or Location(at.file, value.lineno, at.function)
    if isinstance(inner, ast.Attribute | ast.Subscript):
        key = inner.attr if isinstance(inner, ast.Attribute) else inner.slice.value if isinstance(inner.slice, ast.Constant) else None
        line = _field(window, at.file, key, at.line) if isinstance(key, str) else None
        return Location(at.file, line, at.function) if line is not None else Location(at.file, value.lineno, at.function)
    return Location(at.file, value.lineno, at.function)


def unpacked(window: Window, at: Location, call: ast.Call | None, name: str) -> Location | None:
    """The line of an argument that comes out of a mapping: ``SGD(params, **options)``."""
    if call is None or not any(k.arg is None for k in call.keywords):
        return None
    line = _field(window, at.file, name, at.line)
    return Location(at.file, line, at.function) if line is not None else None


def single(value: ast.expr) -> ast.expr:
    """A name inside conversions: ``int(x)``, ``float(cfg.x)``."""
    while isinstance(value, ast.Call) and call_name(value) in ("int", "float", "round", "ceil", "floor", "max", "min") and value.args:
        value = next((a for a in value.args if not isinstance(a, ast.Constant)), value.args[0])
    return value


def _name(window: Window, at: Location, name: ast.Name, depth: int) -> Location | None:
    function = function_around(around(window, at))
    arguments = function.args if function is not None else None
    local = function is not None and any(isinstance(n, ast.Name) and n.id == name.id and isinstance(n.ctx, ast.Store) for n in ast.walk(function))
    if function is not None and arguments is not None and not local:
        every = [*arguments.posonlyargs, *arguments.args]
        index = next((i for i, a in enumerate(every) if a.arg == name.id), None)
        keyword = next((i for i, a in enumerate(arguments.kwonlyargs) if a.arg == name.id), None)
        if index is not None or keyword is not None:
            return _parameter(window, at, function, name.id, index, keyword, depth)
    found = assignment(window, at.file, name.id, at.line)
    if found is None:
        return None
    value = getattr(found, "value", None)
    here = Location(at.file, found.lineno, at.function)
    if isinstance(found, ast.Assign | ast.AnnAssign) and isinstance(value, ast.expr):
        if isinstance(single(value), ast.Name | ast.Attribute) and not isinstance(found.targets[0] if isinstance(found, ast.Assign) else found.target, ast.Tuple):
            return decided(window, here, value, depth - 1)
        return here
    return here


def _parameter(window: Window, at: Location, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, index: int | None, keyword: int | None,
               depth: int) -> Location:
    """A parameter gets its value from the call of the function (or class), or from its default."""
    callers = [function.name]
    shift = 0
    if function.name == "__init__":
        owner = next((s for s in reversed(around(window, at)) if isinstance(s, ast.ClassDef)), None)
        callers = [owner.name] if owner is not None else callers
        shift = 1
    elif index is not None and function.args.args and function.args.args[0].arg == "self":
        shift = 1
    for call in calls(tree(window, at.file), *callers):
        if function.lineno <= call.lineno <= (function.end_lineno or 0):
            continue
        given = argument(call, name, index - shift if index is not None else None)
        if given is not None:
            return decided(window, Location(at.file, call.lineno, at.function), given, depth - 1)
    args = function.args
    if keyword is not None:
        default = args.kw_defaults[keyword]
    else:
        every = [*args.posonlyargs, *args.args]
        place = (index or 0) - (len(every) - len(args.defaults))
        default = args.defaults[place] if 0 <= place < len(args.defaults) else None
    return decided(window, Location(at.file, default.lineno if default is not None else function.lineno, at.function), default, depth - 1) \
        if default is not None else at


def _field(window: Window, file: str, key: str, before: int) -> int | None:
    """A field of a configuration: assignment, class field, keyword, dictionary entry or command-line option of that name."""
    module = tree(window, file)
    found = list(_fields(module, key)) if module is not None else []
    above = [line for line in found if line <= before]
    return (above or found)[-1] if found else None


def _fields(module: ast.Module, key: str) -> Iterator[int]:
    lines: list[int] = []
    for n in ast.walk(module):
        if isinstance(n, ast.Assign | ast.AnnAssign):
            for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
                name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else \
                    target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else None
                if name == key and n.value is not None:
                    value = single(n.value)
                    if not isinstance(value, ast.Name) or value.id != key:
                        lines.append(n.lineno)
        elif isinstance(n, ast.Call):
            lines += [k.value.lineno for k in n.keywords if k.arg == key and isinstance(k.value, ast.Constant)]
            if call_name(n) == "add_argument" and any(isinstance(a, ast.Constant) and isinstance(a.value, str)
                                                      and a.value.lstrip("-").replace("-", "_") == key for a in n.args):
                lines.append(n.lineno)
        elif isinstance(n, ast.Dict):
            lines += [v.lineno for k, v in zip(n.keys, n.values, strict=True) if isinstance(k, ast.Constant) and k.value == key]
    yield from sorted(lines)


def expanded(window: Window, at: Location, value: ast.expr | None, depth: int = 3) -> list[ast.AST]:
    """The nodes of an expression and of what its names were bound to."""
    if value is None:
        return []
    found: list[ast.AST] = list(ast.walk(value))
    if depth > 0:
        for n in list(found):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
                bound = assignment(window, at.file, n.id, at.line)
                inner = getattr(bound, "value", None)
                if isinstance(bound, ast.Assign | ast.AnnAssign) and isinstance(inner, ast.expr) and len(list(ast.walk(inner))) < 60:
                    found += expanded(window, Location(at.file, bound.lineno), inner, depth - 1)
    return found


def keyword_line(window: Window, *names: str) -> Location | None:
    """The line of the first keyword argument (or dictionary key) of one of these names, in any of the user's files."""
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if isinstance(n, ast.Call):
                for k in n.keywords:
                    if k.arg in names:
                        return decided(window, Location(file, k.value.lineno), k.value)
            if isinstance(n, ast.Dict):
                for key, v in zip(n.keys, n.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in names:
                        return decided(window, Location(file, v.lineno), v)
    return None


def functions(window: Window, file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    module = tree(window, file)
    for n in ast.walk(module) if module is not None else ():
        if isinstance(n, FUNCTIONS):
            yield n
