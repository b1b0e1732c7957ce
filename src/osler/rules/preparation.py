"""Where the data that reach a line were prepared: follows a variable back through loops, loaders, datasets and splits.

Text only; where the trail ends early, its last line is the answer, and without sources there is none.
"""

from __future__ import annotations

import ast
import re

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.script import (
    Function,
    around,
    assignment,
    call_name,
    calls,
    function_around,
    function_named,
    parse,
    root,
    targets,
    tree,
)

CONVERTS = frozenset(("tensor", "from_numpy", "as_tensor", "FloatTensor", "Tensor", "load", "read_csv", "fit_transform", "astype", "rand", "randn", "randint", "normal",
                      "uniform", "stack", "column_stack", "hstack", "cat", "arange", "linspace"))
WEIGH = frozenset(("linear", "matmul", "mm", "conv1d", "conv2d"))
LIBRARIES = frozenset(("torch", "np", "numpy", "F", "nn", "pd", "math", "random"))
NUMERIC = re.compile(r"num|cont|dense|float|feat|real", re.I)
PREDICTS = re.compile(r"pred|out|hat|net|model|logit|recon", re.I)


def input_line(window: Window, at: Location | None) -> Location | None:
    """Where the first argument of the model call at a line was made."""
    if at is None:
        return None
    for call in called(window, at):
        start = call.func
        while isinstance(start, ast.Attribute | ast.Call | ast.Subscript):
            start = start.func if isinstance(start, ast.Call) else start.value
        library = isinstance(start, ast.Name) and start.id in LIBRARIES and call_name(call) not in WEIGH
        if not call.args or library or call_name(call) in ("backward", "step", "item", "append", "print", "zero_grad"):
            continue
        first = next((a for a in call.args if NUMERIC.search(ast.unparse(a))), call.args[0]) if len(call.args) > 1 else call.args[0]
        given = first.value if isinstance(first, ast.Starred) else first
        if isinstance(given, ast.Name | ast.Subscript | ast.Attribute | ast.Call | ast.BinOp) and not called_inside(given):
            return follow(window, at, given, 0)
    for node in spanning(window, at, ast.BinOp):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult | ast.Mult):
            for side in (node.left, node.right):
                made = follow(window, at, side, 0)
                if made is not None and not re.search(r"requires_grad|Parameter", window.line(made.file, made.line)):
                    return made
    return from_loader(window, 0, 10)


def called_inside(given: ast.AST) -> bool:
    """The argument itself calls something that is no function of a library: then that is the model call."""
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.args for n in ast.walk(given))


def target_line(window: Window, at: Location | None) -> Location | None:
    """Where the data that a prediction is compared with at a line were made."""
    if at is None:
        return None
    for call in called(window, at):
        if len(call.args) >= 2 and re.search(r"loss|crit|mse|l1|huber|entropy", ast.unparse(call.func), re.I):
            return follow(window, at, call.args[1], 1)
    for node in spanning(window, at, ast.BinOp):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            left, right = node.left, node.right
            return follow(window, at, left if PREDICTS.search(ast.unparse(right)) and not PREDICTS.search(ast.unparse(left)) else right, 1)
    return None


def spanning(window: Window, at: Location, kind: type[ast.AST]) -> list[ast.AST]:
    module = tree(window, at.file)
    return [n for n in ast.walk(module) if isinstance(n, kind) and getattr(n, "lineno", 0) <= at.line <= getattr(n, "end_lineno", 0)] if module is not None else []


def called(window: Window, at: Location) -> list[ast.Call]:
    """Calls on a line, outermost first."""
    return [n for n in spanning(window, at, ast.Call) if isinstance(n, ast.Call)]


def follow(window: Window, at: Location, given: ast.AST, position: int, hops: int = 10) -> Location | None:
    """Back from an expression at a line to the statement that made its values. ``position``: which member of a batch (0 inputs, 1 targets)."""
    best: Location | None = None
    node: ast.AST | None = given
    line = at.line
    for _ in range(hops):
        name = root(node)
        if name is None:
            break
        statement, line, position = bound_by(window, at.file, name, line, position)
        if statement is None:
            return from_loader(window, position, hops) or best
        best = Location(at.file, statement.lineno)
        value = statement.iter if isinstance(statement, ast.For | ast.AsyncFor) else getattr(statement, "value", None)
        if isinstance(value, ast.Call):
            inside = dataset(window, at.file, value, position)
            if inside is not None:
                return inside
            made = function_named(window, at.file, call_name(value))
            result = returned(made, statement, name) if made is not None else None
            if made is not None and result is not None:
                node, line = result, made.end_lineno or made.lineno
                continue
        node = source(value, statement, name, position)
        if node is None:
            break
        if isinstance(value, ast.expr) and not isinstance(statement, ast.For) and any(call_name(c) in CONVERTS for c in calls(value)):
            break
    return best


def from_loader(window: Window, position: int, hops: int) -> Location | None:
    """The trail ended in a framework: what the first loader was given."""
    for fact in window.facts("loader"):
        if fact.at is not None and hops > 4:
            for call in called(window, fact.at):
                if call_name(call) == "DataLoader" and call.args:
                    inside = dataset(window, fact.at.file, call, position)
                    return inside or follow(window, fact.at, source(call, ast.Pass(), "", position) or call.args[0], position, hops - 5)
    return None


def bound_by(window: Window, file: str, name: str, line: int, position: int) -> tuple[ast.stmt | None, int, int]:
    """The statement that binds a name before a line, or the argument of the call that hands it to the function around."""
    found = around(window, Location(file, line))
    function = function_around(found)
    parameters = [a.arg for a in function.args.args] if function is not None else []
    if function is not None and name in parameters:
        own = [s for s in ast.walk(function) if isinstance(s, ast.stmt) and s is not function and name in targets(s) and s.lineno < line]
        if own:
            return own[-1], own[-1].lineno, position
        index = parameters.index(name) - (parameters[0] == "self")
        module = tree(window, file)
        for call in ast.walk(module) if module is not None else ():
            if isinstance(call, ast.Call) and call_name(call) in (function.name, "__call__") and (index < len(call.args) or any(k.arg == name for k in call.keywords)):
                given = next((k.value for k in call.keywords if k.arg == name), None) or call.args[index]
                made = ast.Assign([ast.Name(name)], given, lineno=call.lineno)
                return made, call.lineno, position
        return None, line, position
    loops = [s for s in found if isinstance(s, ast.For | ast.AsyncFor) and name in targets(s)]
    statement = loops[-1] if loops else assignment(window, file, name, line)
    if statement is not None and isinstance(statement, ast.For | ast.AsyncFor):
        wanted = statement.target.elts if isinstance(statement.target, ast.Tuple) else [statement.target]
        names = [ast.unparse(w) for w in wanted]
        position = names.index(name) if name in names and len(names) > 1 else position
        if len(wanted) == 2 and isinstance(wanted[1], ast.Tuple):  # for i, (x, y) in enumerate(loader)
            inner = [ast.unparse(w) for w in wanted[1].elts]
            position = inner.index(name) if name in inner else position
    return statement, statement.lineno if statement is not None else line, position


def source(value: ast.AST | None, statement: ast.stmt, name: str, position: int) -> ast.AST | None:
    """The expression whose values a statement passes on."""
    if not isinstance(value, ast.Call):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            names = [ast.unparse(t) for t in target.elts]
            return value.elts[names.index(name)] if name in names else None
        return value
    kind = call_name(value)
    if kind in ("DataLoader", "enumerate", "tqdm", "iter", "next", "random_split", "Subset", "cycle") and value.args:
        return source(value.args[0], statement, name, position) if isinstance(value.args[0], ast.Call) else value.args[0]
    if kind in ("TensorDataset", "zip") and value.args:
        return value.args[min(position, len(value.args) - 1)]
    if kind == "train_test_split" and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
        names = [ast.unparse(t) for t in statement.targets[0].elts]
        return value.args[min(names.index(name) // 2, len(value.args) - 1)] if name in names and value.args else None
    return value


def returned(function: Function, statement: ast.stmt, name: str) -> ast.AST | None:
    """What a function of the user's returns for a name that a statement binds to its result."""
    done = [r.value for r in ast.walk(function) if isinstance(r, ast.Return) and r.value is not None]
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not done or not isinstance(target, ast.Tuple):
        return done[-1] if done else None
    names = [ast.unparse(t) for t in target.elts]
    value = done[-1]
    return value.elts[names.index(name)] if name in names and isinstance(value, ast.Tuple) and len(value.elts) == len(names) else None


def dataset(window: Window, file: str, value: ast.Call, position: int) -> Location | None:
    """Inside a dataset class of the user's: the line that fills what ``__getitem__`` returns at ``position``."""
    for call in (c for c in ast.walk(value) if isinstance(c, ast.Call)):
        module = parse(window.sources.get(file, ""))
        for node in module.body if module is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == call_name(call):
                item = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in ("__getitem__", "__iter__")), None)
                done = next((r for r in ast.walk(item) if isinstance(r, ast.Return | ast.Yield) and r.value is not None), None) if item is not None else None
                if done is None or item is None:
                    return None
                given = done.value.elts[min(position, len(done.value.elts) - 1)] if isinstance(done.value, ast.Tuple) else done.value
                name = root(given)
                if name is not None and not name.startswith("self."):
                    own = [s for s in ast.walk(item) if isinstance(s, ast.stmt) and name in targets(s)]
                    if own and "self." not in str(root(getattr(own[-1], "value", None))):
                        return Location(file, own[-1].lineno)
                    name = root(getattr(own[-1], "value", None)) if own else None
                filled = [s for s in ast.walk(node) if isinstance(s, ast.stmt) and name is not None and name in targets(s)]
                return Location(file, filled[-1].lineno) if filled else Location(file, done.lineno)
    return None
