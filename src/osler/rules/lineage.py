"""Which rows a value of the user's script was computed from: all of a table, or one side of a split. Read from the text alone.

An abstract walk through the script in the order of execution: functions and methods of the user's own are entered, loops walked
twice, both branches of a condition taken. A value knows the tables it holds whole, the tables it holds a part of, whether labels
went into it, and the statistics over whole tables that it carries. Nothing is executed. What library calls mean is in
``lineage_calls``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import lru_cache

from osler.rules.lineage_calls import called, indexed, learn
from osler.rules.lineage_values import EMPTY, FEATURE, LABEL, Lineage, Split, Value, join, named_labels
from osler.rules.script import FUNCTIONS, LOOPS, Function, call_name, root, trains

MAX_DEPTH, MAX_WORK, MAX_LINES = 8, 40_000, 2500


class Walk:
    """The walk through one file."""

    def __init__(self, module: ast.Module) -> None:
        self.found = Lineage()
        self.functions: dict[str, Function] = {n.name: n for n in module.body if isinstance(n, FUNCTIONS)}
        self.classes: dict[str, ast.ClassDef] = {n.name: n for n in ast.walk(module) if isinstance(n, ast.ClassDef)}
        self.objects: list[tuple[str, dict[str, Value]]] = [("", {})]
        self.stack: list[str] = []
        self.lines: list[int] = []
        self.counters: set[str] = set()
        self.frames: set[int] = set()
        self.returned: list[Value] = []
        self.tables: dict[tuple[int, int], int] = {}
        self.labels, self.label_columns = named_labels(module)
        self.batches = 0
        self.work = 0
        self.globals: dict[str, Value] = {}
        self.block(module.body, self.globals)
        self.leftovers()

    # -- statements ------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], env: dict[str, Value]) -> None:
        for statement in body:
            self.work += 1
            if self.work < MAX_WORK:
                self.statement(statement, env)

    def statement(self, node: ast.stmt, env: dict[str, Value]) -> None:
        if isinstance(node, FUNCTIONS):
            self.functions.setdefault(node.name, node)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value, env)
            for target in node.targets:
                self.bind(target, value, env)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.bind(node.target, self.value(node.value, env), env)
        elif isinstance(node, ast.AugAssign):
            self.bind(node.target, join((self.value(node.target, env), self.value(node.value, env))), env)
        elif isinstance(node, ast.Expr):
            self.value(node.value, env)
        elif isinstance(node, ast.Return):
            self.returned.append(self.value(node.value, env) if node.value is not None else EMPTY)
        elif isinstance(node, LOOPS):
            inner = trains(node) and not any(isinstance(n, LOOPS) and n is not node and trains(n) for n in ast.walk(node))
            self.batches += inner
            if isinstance(node, ast.For):
                self.count(node.target, node.iter)
            for _ in range(2):
                if isinstance(node, ast.For | ast.AsyncFor):
                    over = self.value(node.iter, env)
                    self.bind(node.target, join(over.items) if over.items and not isinstance(node.target, ast.Tuple) else over, env)
                self.block(node.body, env)
            self.batches -= inner
            self.block(node.orelse, env)
        elif isinstance(node, ast.If):
            self.value(node.test, env)
            self.block(node.body, env)
            self.block(node.orelse, env)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.value(item.context_expr, env)
            self.block(node.body, env)
        elif isinstance(node, ast.Try):
            for part in (node.body, node.orelse, node.finalbody):
                self.block(part, env)

    def bind(self, target: ast.expr, value: Value, env: dict[str, Value]) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = value.items if len(value.items) == len(target.elts) else tuple(replace(value, items=()) for _ in target.elts)
            for element, part in zip(target.elts, parts, strict=True):
                self.bind(element.value if isinstance(element, ast.Starred) else element, part, env)
        elif isinstance(target, ast.Name):
            env[target.id] = self.named(target.id, value)
            if value.rows:
                self.found.bound[target.id] = env[target.id]
            if value.part and value.learned:
                self.found.applied.append(env[target.id])
        elif isinstance(target, ast.Attribute):
            holder = self.value(target.value, env)
            if holder.made:
                self.objects[holder.made][1][target.attr] = self.named(target.attr, value)
            else:
                self.bind_into(target.value, value, env)
        elif isinstance(target, ast.Subscript):
            column = target.slice.value if isinstance(target.slice, ast.Constant) else None
            if not (isinstance(column, str) and column in self.label_columns):
                self.bind_into(target.value, value, env)

    def bind_into(self, holder: ast.expr, value: Value, env: dict[str, Value]) -> None:
        """A store into an element: the container now carries what was stored."""
        name = root(holder)
        if name is None:
            return
        if name in env:
            old = env[name]
            env[name] = replace(join((old, value)), made=old.made, items=old.items, label=old.label or (value.label and not old.rows), mask=False)
        elif name.startswith("self.") and "self" in env and env["self"].made:
            inside = self.objects[env["self"].made][1]
            inside[name[5:]] = join((inside.get(name[5:], EMPTY), value))

    def named(self, name: str, value: Value) -> Value:
        if LABEL.match(name) or name in self.labels:
            return replace(value, label=True)
        return replace(value, label=False) if FEATURE.match(name) and not value.mask else value

    # -- calls of the user's own functions -------------------------------------------------------------------------

    def enter(self, function: Function, given: list[Value], named: dict[str, Value], owner: Value | None, label: str, line: int) -> Value:
        if len(self.stack) >= MAX_DEPTH or label in self.stack or self.work >= MAX_WORK:
            return join([*given, *named.values()])
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
        env = {} if owner is None else dict(self.globals)
        if owner is None:
            env = dict(self.globals)
        elif names and not static:
            env[names.pop(0)] = owner
        defaults = function.args.defaults
        for name, default in zip(names[len(names) - len(defaults):], defaults, strict=False):
            env[name] = self.value(default, self.globals)
        env |= {a.arg: named.get(a.arg, EMPTY) for a in function.args.kwonlyargs}
        for name, value in (*zip(names, given, strict=False), *((k, v) for k, v in named.items() if k in names)):
            env[name] = replace(value, label=True) if LABEL.match(name) and value.rows else value
        self.stack.append(label)
        self.lines.append(line)
        before, self.returned = self.returned, []
        self.block(function.body, env)
        result, self.returned = self.returned, before
        self.stack.pop()
        self.lines.pop()
        return join(r for r in result if r is not EMPTY) if result else EMPTY

    def build(self, name: str, given: list[Value], named: dict[str, Value], line: int) -> Value:
        """An instance of a class of the user's own."""
        self.objects.append((name, {}))
        self_value = Value(made=len(self.objects) - 1)
        found = self.method(name, "__init__")
        if found is not None:
            self.enter(found, given, named, self_value, f"{name}.__init__", line)
        else:
            fields = [s.target.id for s in self.classes[name].body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            self.objects[self_value.made][1].update({**dict(zip(fields, given, strict=False)), **named})
        return self_value

    def method(self, name: str, attribute: str, depth: int = 0) -> Function | None:
        owner = self.classes.get(name)
        if owner is None or depth > 4:
            return None
        own = next((s for s in owner.body if isinstance(s, FUNCTIONS) and s.name == attribute), None)
        return own or next((m for b in owner.bases if (m := self.method(getattr(b, "id", getattr(b, "attr", "")), attribute, depth + 1)) is not None), None)

    def leftovers(self) -> None:
        """Hooks that a framework calls: data modules prepare their tables there."""
        for number, (name, _) in enumerate(list(self.objects)):
            for hook in ("prepare_data", "setup"):
                found = self.method(name, hook)
                if found is not None:
                    self.enter(found, [], {}, Value(made=number), f"{name}.{hook}", found.lineno)

    # -- expressions -----------------------------------------------------------------------------------------------

    def value(self, node: ast.expr | None, env: dict[str, Value]) -> Value:
        self.work += 1
        if node is None or self.work > MAX_WORK:
            return EMPTY
        if isinstance(node, ast.Name):
            return env.get(node.id, EMPTY)
        if isinstance(node, ast.Constant):
            return Value(names=(node.value,)) if isinstance(node.value, str) else EMPTY
        if isinstance(node, ast.Attribute):
            holder = self.value(node.value, env)
            if holder.made:
                return self.objects[holder.made][1].get(node.attr, EMPTY)
            if node.attr in ("T", "mT"):
                return replace(holder, turned=True)
            if node.attr in ("shape", "size", "dtype", "device", "columns", "index", "ndim"):
                return EMPTY if holder.rows else Value(learned=holder.learned)
            return replace(holder, label=True) if node.attr in self.label_columns else holder
        if isinstance(node, ast.Subscript):
            return indexed(self, node, env)
        if isinstance(node, ast.Call):
            return called(self, node, env)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [self.value(e, env) for e in node.elts]
            whole = join(parts)
            return replace(whole, items=tuple(parts), made=0, names=tuple(n for p in parts for n in p.names))
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            inner = dict(env)
            for g in node.generators:
                self.count(g.target, g.iter)
                over = self.value(g.iter, inner)
                self.bind(g.target, join(over.items) if over.items and not isinstance(g.target, ast.Tuple) else over, inner)
            body = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return replace(join([self.value(e, inner) for e in body]), items=())
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left, env), self.value(node.right, env)
            if isinstance(node.op, ast.MatMult) and left.turned and left.rows and right.rows:
                return learn(join((left, right)), self.trail(node), left.label or right.label)
            both = replace(join((left, right)), items=(), made=0)
            return replace(both, names=left.names + right.names)
        if isinstance(node, ast.Compare | ast.BoolOp):
            parts = [self.value(e, env) for e in ([node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values)]
            equal = isinstance(node, ast.Compare) and all(isinstance(o, ast.Eq | ast.NotEq) for o in node.ops) \
                and not any(re.search(r"fold|split|part|side|is_", n.id) for n in ast.walk(node) if isinstance(n, ast.Name))
            return replace(join(parts), mask=not equal, items=())
        if isinstance(node, ast.Dict):
            return join([self.value(v, env) for v in node.values])
        if isinstance(node, ast.IfExp):
            return join((self.value(node.body, env), self.value(node.orelse, env)))
        if isinstance(node, ast.Lambda):
            return Value(learned=self.value(node.body, env).learned)
        return join([self.value(e, env) for e in ast.iter_child_nodes(node) if isinstance(e, ast.expr)])

    def count(self, target: ast.expr, over: ast.expr) -> None:
        """Loop variables that count: elements picked with them are no division of rows."""
        if isinstance(over, ast.Call) and call_name(over) in ("range", "enumerate", "trange"):
            first = target.elts[0] if isinstance(target, ast.Tuple) and call_name(over) == "enumerate" and target.elts else target
            self.counters |= {n.id for n in ast.walk(first) if isinstance(n, ast.Name)}

    def table(self, node: ast.AST) -> Value:
        """Data that is born at this expression."""
        key = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        number = self.tables.setdefault(key, len(self.tables) + 1)
        self.found.births.setdefault(number, self.trail(node))
        return Value(whole=frozenset((number,)))

    def trail(self, node: ast.AST) -> tuple[int, ...]:
        return (*self.lines, int(getattr(node, "lineno", 0)))

    def cut(self, node: ast.AST, value: Value, how: str, pieces: tuple[Value, ...]) -> None:
        if not self.batches and "__getitem__" not in str(self.stack[-1:]) and (value.whole or how == "random"):
            self.found.splits.append(Split(self.trail(node), how, node, ast.unparse(node), value.whole, pieces))


@lru_cache(maxsize=16)
def lineage(text: str) -> Lineage | None:
    """The walk of one file; ``None`` where its text does not parse or the walk fails."""
    if text.count("\n") > MAX_LINES:
        return None
    try:
        return Walk(ast.parse(text)).found
    except (SyntaxError, ValueError, RecursionError, AttributeError, TypeError, IndexError):
        return None
