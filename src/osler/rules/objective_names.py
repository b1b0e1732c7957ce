"""Names in a script's text: what they were bound to, what a call of the user's own returns, and which of it ran. Nothing is executed."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

from osler.core.window import Window
from osler.rules import script
from osler.rules.scopes import Scope, appended, constant_value, own_nodes

LIBRARIES = frozenset(("torch", "th", "F", "nn", "np", "functional", "optim", "distributions", "special", "linalg", "math", "jnp", "numpy"))


@dataclass(frozen=True)
class Place:
    """Where an expression stands: its file, the function around it, and what that function's parameters are bound to."""

    file: str
    scope: Scope
    before: int
    bound: dict[str, tuple[ast.expr, Place]] = field(default_factory=dict)
    owner: ast.ClassDef | None = None


class Names:
    """Of one window; ``ran`` are the lines seen running, which decide between branches."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.ran: dict[str, set[int]] = {}
        for trace in window.traces:
            for op in trace.ops:
                for at in op.lines:
                    self.ran.setdefault(at.file, set()).add(at.line)
        self.functions: dict[str, list[tuple[str, ast.FunctionDef, ast.ClassDef | None]]] = {}
        self.classes: dict[str, tuple[str, ast.ClassDef]] = {}
        for file in window.sources:
            module = script.tree(window, file)
            for node in ast.walk(module) if module is not None else ():
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = (file, node)
                    for item in node.body:
                        if isinstance(item, ast.FunctionDef):
                            self.functions.setdefault(item.name, []).append((file, item, node))
                elif isinstance(node, ast.FunctionDef) and not any(node is f for _, f, _ in self.functions.get(node.name, ())):
                    self.functions.setdefault(node.name, []).append((file, node, None))
        self.budget = 1500
        self.guessed = False
        self._bindings: dict[int, dict[str, list[ast.stmt]]] = {}
        self.stop: re.Pattern[str] | None = None
        self.halt: frozenset[str] = frozenset(("log", "log2", "log10"))

    def did_run(self, file: str, node: ast.AST) -> bool:
        """False only where the file was traced and no line of the node was."""
        ran = self.ran.get(file)
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        return not ran or any(line in ran for line in range(first, last + 1))

    def assignments(self, name: str, place: Place) -> list[ast.stmt]:
        """Statements of the scope that bind or extend a name, above the place; for attributes, of the whole class."""
        scope: ast.AST = place.owner if place.owner is not None and name.startswith("self.") else place.scope
        found = self.bindings(scope).get(name, [])
        above = [n for n in found if n.lineno < place.before]
        if not above and found and name.startswith("self."):
            above = sorted(found, key=lambda n: n.lineno)
        executed = [n for n in above if isinstance(n, ast.Assign) is False or self.did_run(place.file, n) or constant_value(n)]
        return executed or above

    def bindings(self, scope: ast.AST) -> dict[str, list[ast.stmt]]:
        """Statements of a scope by the names that they bind or append to, in order of lines."""
        known = self._bindings.get(id(scope))
        if known is None:
            known = self._bindings[id(scope)] = {}
            for node in own_nodes(scope):
                if isinstance(node, ast.stmt) and not isinstance(node, ast.For | ast.With):
                    for name in script.targets(node) | appended(node):
                        known.setdefault(name, []).append(node)
            for statements in known.values():
                statements.sort(key=lambda n: n.lineno)
        return known

    def constant(self, node: ast.expr, place: Place, depth: int = 4) -> float | None:
        """Value of a literal or of a name that was bound to one."""
        if isinstance(node, ast.Constant):
            return float(node.value) if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand, place, depth)
            return -value if value is not None else None
        name = script.dotted(node)
        if name is not None and depth:
            parts = self.expand(name, place)
            if parts is None or len(parts) != 1:
                found = [n for n in self.assignments(name, place) if isinstance(n, ast.Assign)]
                return self.constant(found[-1].value, place, depth - 1) if len(found) == 1 and isinstance(found[-1].value, ast.Constant) else None
            return self.constant(parts[0][0], parts[0][1], depth - 1)
        return None

    def expand(self, name: str, place: Place) -> list[tuple[ast.expr, Place, int]] | None:
        """``(expression, place, sign)`` a name stands for; ``None`` where it cannot be told."""
        found = self.assignments(name, place)
        if name in place.bound and not found:
            node, outer = place.bound[name]
            return [(node, outer, 1)]
        if not found:
            if not isinstance(place.scope, ast.Module) and "." not in name:
                module = script.tree(self.window, place.file)
                if module is not None:
                    parameters = {a.arg for a in (*place.scope.args.args, *place.scope.args.kwonlyargs)}
                    if name not in parameters:
                        return self.expand(name, Place(place.file, module, 10**9))
            return None
        parts: list[tuple[ast.expr, Place, int]] = []
        for statement in reversed(found):
            here = replace(place, before=statement.lineno)
            if isinstance(statement, ast.AugAssign):
                if isinstance(statement.op, ast.Add | ast.Sub):
                    parts.append((statement.value, here, -1 if isinstance(statement.op, ast.Sub) else 1))
                    continue
                if isinstance(statement.op, ast.Mult | ast.Div):
                    scaled = ast.BinOp(left=ast.Name(id=name, ctx=ast.Load()), op=statement.op, right=statement.value)
                    parts.append((ast.copy_location(ast.fix_missing_locations(ast.copy_location(scaled, statement.value)), statement.value), here, 1))
                    return parts
                return None
            if isinstance(statement, ast.Expr):
                call = statement.value
                if isinstance(call, ast.Call) and call.args:
                    parts.append((call.args[0], here, 1))
                continue
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Assign | ast.AnnAssign) and value is not None:
                chosen = self.component(statement, name, value)
                if chosen is None:
                    return parts or None
                if not (isinstance(chosen, ast.List) and not chosen.elts) and not isinstance(chosen, ast.Constant):
                    parts.append((chosen, here, 1))
                return parts or None
        return parts or None

    def component(self, statement: ast.stmt, name: str, value: ast.expr) -> ast.expr | None:
        """The part of a tuple assignment that a name gets; a call that returns a tuple is marked with the position."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Tuple | ast.List):
            index = next((i for i, t in enumerate(target.elts) if script.dotted(t) == name), None)
            if index is None:
                return None
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                return value.elts[index]
            made = ast.Subscript(value=value, slice=ast.Constant(value=index), ctx=ast.Load())
            return ast.copy_location(ast.fix_missing_locations(ast.copy_location(made, value)), value)
        return value

    def called(self, node: ast.Call, place: Place) -> list[tuple[ast.expr, Place]] | None:
        """What a call of the user's own function, method or loss object returns, with its parameters bound."""
        name, function, skip = script.call_name(node), None, 0
        callee: tuple[str, ast.FunctionDef, ast.ClassDef | None] | None = None
        base = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(base, ast.Name) and base.id in LIBRARIES:
            return None
        own = self.functions.get(name, [])
        if base is None:
            callee = next((f for f in own if f[2] is None), None)
        elif isinstance(base, ast.Name) and base.id == "self":
            callee = next((f for f in own if f[2] is place.owner), None) or next((f for f in own if f[2] is not None), None)
            skip = 1
        if callee is None:
            kind = self.class_of(node.func, place)
            callee = next((f for f in self.functions.get("forward", []) + self.functions.get("__call__", []) if f[2] is kind), None) if kind is not None else None
            skip = 1
        if callee is None and base is not None and len(own) == 1 and own[0][2] is not None and name not in ("forward", "step", "__call__"):
            callee, skip = own[0], 0 if any(script.call_name(d) == "staticmethod" if isinstance(d, ast.Call) else script.dotted(d) == "staticmethod" for d in own[0][1].decorator_list) else 1
        if callee is None:
            return None
        file, function, owner = callee
        parameters = [a.arg for a in function.args.args][skip if owner is not None else 0:]
        bound: dict[str, tuple[ast.expr, Place]] = {p: (a, place) for p, a in zip(parameters, node.args, strict=False)}
        bound.update({k.arg: (k.value, place) for k in node.keywords if k.arg})
        defaults = dict(zip(reversed([a.arg for a in function.args.args]), reversed(function.args.defaults), strict=False))
        where = Place(file, function, 10**9, {**{k: (v, Place(file, function, 0)) for k, v in defaults.items()}, **bound}, owner)
        returns = [n for n in own_nodes(function) if isinstance(n, ast.Return) and n.value is not None]
        ran = [r for r in returns if self.did_run(file, r)] or returns[-1:]
        return [(r.value, replace(where, before=r.lineno)) for r in ran if r.value is not None] or None

    def class_of(self, node: ast.expr, place: Place) -> ast.ClassDef | None:
        """The user's class that a callable object is made of."""
        if isinstance(node, ast.Call):
            name = script.call_name(node)
            return self.classes[name][1] if name in self.classes else None
        name = script.dotted(node) or ""
        parts = self.expand(name, place) if name else None
        if not parts and name:
            for _, kind in self.classes.values():
                for n in ast.walk(kind):
                    if isinstance(n, ast.Assign) and name in script.targets(n) and isinstance(n.value, ast.Call):
                        made = script.call_name(n.value)
                        return self.classes[made][1] if made in self.classes else None
        value = parts[0][0] if parts else None
        return self.class_of(value, parts[0][1]) if isinstance(value, ast.Call) and parts else None
