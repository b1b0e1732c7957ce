"""Loss scaling in the script's text: what happens, in order, between a scaled backward pass and the step.

The text gives the order, calls of the user's own functions included; facts and traces say whether a line ran. A scaler of torch and
one written by hand (``(loss * scale).backward()``) are read alike.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, Function, call_name, calls, targets, tree, words

SCALE = re.compile(r"(^|_)(loss_?scale|scale|scaling|loss_?scaler|scaler|ls)(_|$)", re.I)
INVERSE = re.compile(r"(^|_)(inv|inverse|unscale|scale|scaling)", re.I)
CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_grad_norm")
HARMLESS = frozenset(("isfinite", "isinf", "isnan", "zero_", "is_sparse", "grad_fn", "data_ptr", "zeros_like"))
MAGNITUDES = frozenset(("norm", "vector_norm", "_foreach_norm", "pow", "square", "abs", "max", "min", "clamp", "clamp_", "clip", "clip_", "std", "var", "item", "sum", "sqrt", "add_", "sub_", "mean",
                        "tolist", "histogram", "histc", "quantile", "median", "sign", "dot", "topk", "numpy"))
"""What takes a gradient's size for real. Masks, averages over ranks and copies do not care about a factor."""


@dataclass(frozen=True, slots=True)
class Event:
    """``kind``: scale, backward, unscale, clip, use, scaler-step, step, update, clear."""

    kind: str
    line: int
    node: ast.AST
    by_hand: bool = False


def scaler_names(module: ast.Module) -> set[str]:
    """Names that hold a GradScaler: by what they are bound to, else by how they are called."""
    found = {name.split(".")[-1] for s in ast.walk(module) if isinstance(s, ast.Assign | ast.AnnAssign) and s.value is not None
             and any(call_name(c).endswith("GradScaler") for c in calls(s.value)) for name in targets(s)}
    return found | {w for n in ast.walk(module) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("unscale_", "scale")
                    and n.args and (w := last(n.func.value)) and re.search(r"scaler|amp", w, re.I)}


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def events(module: ast.Module, body: list[ast.stmt], scalers: set[str], depth: int = 3) -> list[Event]:
    """What a block does to scaled gradients, in the order of the text, the user's own functions followed."""
    functions: dict[str, Function] = {n.name: n for n in ast.walk(module) if isinstance(n, FUNCTIONS)}
    found: list[Event] = []
    scaled: set[str] = set()

    def visit(statements: list[ast.stmt], depth: int) -> None:
        for s in statements:
            if isinstance(s, (*FUNCTIONS, ast.ClassDef)):
                continue
            heads = [v for name, v in ast.iter_fields(s) if name not in ("body", "orelse", "finalbody", "handlers")]
            parts = [n for v in heads for n in (v if isinstance(v, list) else [v]) if isinstance(n, ast.AST)]
            simple(s, parts, depth)
            for name in ("body", "handlers", "orelse", "finalbody"):
                inner = getattr(s, name, None) or []
                for item in inner:
                    if isinstance(item, ast.ExceptHandler):
                        visit(item.body, depth)
                visit([i for i in inner if isinstance(i, ast.stmt)], depth)

    def simple(s: ast.stmt, parts: list[ast.AST], depth: int) -> None:
        made = sorted((c for p in parts for c in calls(p)), key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0))
        hand = hand_scaled(parts)
        if hand and isinstance(s, ast.Assign):
            scaled.update(t for t in targets(s))
        for c in made:
            name, owner = call_name(c), c.func.value if isinstance(c.func, ast.Attribute) else None
            holder = last(owner) if owner is not None else ""
            if name == "scale" and holder in scalers:
                found.append(Event("scale", c.lineno, c))
            elif name == "unscale_":
                found.append(Event("unscale", c.lineno, c))
            elif name in ("backward", "grad"):
                given = owner if name == "backward" and not (isinstance(owner, ast.Attribute | ast.Name) and last(owner) in ("accelerator", "autograd", "engine")) \
                    else c.args[0] if c.args else None
                if given is not None and (hand_scaled([given]) or (isinstance(given, ast.Name) and given.id in scaled)):
                    found.append(Event("scale", c.lineno, c, by_hand=True))
                found.append(Event("backward", c.lineno, c))
            elif name in CLIPS:
                found.append(Event("clip", c.lineno, c))
            elif name == "step":
                found.append(Event("scaler-step" if holder in scalers else "step", c.lineno, c))
            elif name == "update" and holder in scalers:
                found.append(Event("update", c.lineno, c))
            elif name == "zero_grad":
                found.append(Event("clear", c.lineno, c))
            elif depth and name in functions and (owner is None or holder in ("self", "trainer", "engine", "model") or name not in ("forward", "step", "update", "scale")):
                visit(functions[name].body, depth - 1)
        use = gradient_use(s, parts)
        if use is not None:
            found.append(Event(use, s.lineno, s))

    visit(body, depth)
    return found


def hand_scaled(parts: list[ast.AST]) -> ast.BinOp | None:
    """A product of a loss and something called a scale."""
    for p in parts:
        for n in ast.walk(p):
            if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult):
                sides = [last(n.left), last(n.right)]
                if any(SCALE.search(x) for x in sides) and any(re.search(r"loss|nll|(^|_)(l|out|obj|total|ce)($|_|\d)", w, re.I) for w in words(n)):
                    return n
    return None


def gradient_use(s: ast.stmt, parts: list[ast.AST]) -> str | None:
    """``use`` when the statement reads or changes gradients as they are, ``unscale`` when it divides them by a scale."""
    reads = [n for p in parts for n in ast.walk(p) if isinstance(n, ast.Attribute) and n.attr == "grad" and last(n.value) not in ("autograd", "torch")]
    every = {w for p in parts for w in words(p)}
    if not reads:
        return None
    for n in [s, *parts]:
        if isinstance(n, ast.If | ast.While | ast.Compare) and _is_none_test(n):
            return None
    if any(INVERSE.search(w) for w in every):
        return "unscale"
    if every & HARMLESS or all(_only_none(s, r) for r in reads):
        return None
    squares = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow | ast.Add | ast.Sub) for p in parts for n in ast.walk(p)) or isinstance(s, ast.AugAssign)
    return "use" if squares or every & MAGNITUDES else None


def _is_none_test(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If | ast.While) else node
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)


def _only_none(s: ast.stmt, read: ast.Attribute) -> bool:
    """The gradient is only compared with ``None``."""
    return any(isinstance(n, ast.Compare) and n.left is read and isinstance(n.ops[0], ast.Is | ast.IsNot) for n in ast.walk(s))


def scopes(window: Window) -> Iterator[tuple[str, ast.Module, list[Event]]]:
    """Every function, and the module's own body, with its events: (file, module, events)."""
    for file in {f.at.file for f in window.all_facts if f.at is not None}:
        module = tree(window, file)
        if module is None:
            continue
        scalers = scaler_names(module)
        bodies = [module.body, *(n.body for n in ast.walk(module) if isinstance(n, FUNCTIONS))]
        for body in bodies:
            found = events(module, body, scalers)
            if any(e.kind == "scale" for e in found):
                yield file, module, found


def ran(window: Window, file: str, first: int, last: int | None = None) -> bool:
    """Whether the recorded steps passed these lines; true where nothing was recorded or the record was cut off."""
    if not window.traces or any(t.truncated for t in window.traces):
        return True
    return any(first <= at.line <= (last or first) and at.file == file for t in window.traces for op in t.ops for at in op.lines)


def active(window: Window) -> list[Fact]:
    """Scalers that really scale."""
    newest: dict[str, Fact] = {}
    for f in window.facts("scaler"):
        newest[str(f.at)] = f
    return [f for f in newest.values() if f.get("enabled", True)]


@dataclass(frozen=True, slots=True)
class HandScale:
    """A factor that losses are multiplied with by hand before their backward pass. ``changes``: it is assigned anew somewhere."""

    file: str
    line: int
    name: str
    value: float | None
    changes: bool
    events: tuple[Event, ...]


def hand_scales(window: Window) -> Iterator[HandScale]:
    seen: set[tuple[str, int]] = set()
    for file, module, found in scopes(window):
        for e in found:
            if e.kind != "scale" or not e.by_hand or (file, e.line) in seen:
                continue
            product = hand_scaled([e.node]) or next((b for s in ast.walk(module) if isinstance(s, ast.Assign) and (b := hand_scaled([s.value]))), None)
            if product is None or not any(x.kind in ("step", "scaler-step") for x in found):
                continue
            seen.add((file, e.line))
            name = next(last(side) for side in (product.left, product.right) if SCALE.search(last(side)))
            yield HandScale(file, e.line, name, value_of(window, file, name, e.line), reassigned(module, name), tuple(found))


def reassigned(module: ast.Module, name: str) -> bool:
    """Whether a name or attribute gets values after its first one."""
    bindings = [n for n in ast.walk(module) if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign) and any(t.split(".")[-1] == name for t in targets(n))]
    return len(bindings) > 1 or any(isinstance(n, ast.AugAssign) for n in bindings)


OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Pow: operator.pow, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Add: operator.add, ast.Sub: operator.sub}


def number(node: ast.AST | None) -> float | None:
    """Value of a constant arithmetic expression: ``2.0 ** 16``, ``1 << 10``, ``1 / 128``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return -inner if inner is not None else None
    if isinstance(node, ast.BinOp):
        a, b = number(node.left), number(node.right)
        if a is None or b is None:
            return None
        try:
            if isinstance(node.op, ast.LShift):
                return float(int(a) << int(b))
            operation = OPERATIONS.get(type(node.op))
            return float(operation(a, b)) if operation is not None else None
        except (ZeroDivisionError, OverflowError, ValueError, TypeError):
            return None
    return None


def value_of(window: Window, file: str, name: str, before: int) -> float | None:
    """Number that a plain name or an attribute was first bound to, arithmetic and defaults of parameters included."""
    module = tree(window, file)
    for n in ast.walk(module) if module is not None else ():
        if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None and any(t.split(".")[-1] == name for t in targets(n)):
            found = number(n.value)
            if found is not None:
                return found
    return attribute_value(window, file, module, name) if module is not None else None


def attribute_value(window: Window, file: str, module: ast.Module, name: str) -> float | None:
    """Number that ``self.<name>`` or a parameter of that name starts at."""
    for f in ast.walk(module):
        if isinstance(f, FUNCTIONS):
            positional = f.args.args[-len(f.args.defaults):] if f.args.defaults else []
            for a, d in [*zip(positional, f.args.defaults, strict=True), *((a, d) for a, d in zip(f.args.kwonlyargs, f.args.kw_defaults, strict=True) if d is not None)]:
                if a.arg == name and number(d) is not None:
                    return number(d)
    for s in ast.walk(module):
        if isinstance(s, ast.Assign) and any(t.split(".")[-1] == name for t in targets(s)) and number(s.value) is not None:
            return number(s.value)
    return None


def where(file: str, line: int) -> Location:
    return Location(file, line)
