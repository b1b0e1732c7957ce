"""Which order the rows of a value are in, as far as the script's text tells: a small abstract interpretation of indexing, shuffling,
sorting and splitting.

Every value carries, for each source of rows it is made of, the list of reorderings since. Two values that are paired (as input and
target) and share a source must share the reorderings. What is not understood is unknown, and unknown never disagrees. Nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.rules.order_steps import LOSSES, SEEDS, Mismatch, Order, compare, labelish
from osler.rules.order_values import INDEXLIKE, RESEEDED, Scope, Values, generator, union
from osler.rules.script import FUNCTIONS, call_name, dotted


class Reader(Values):
    """Reads one file and keeps what is paired against the grain."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Mismatch] = []
        self.agreed: list[tuple[int, str]] = []
        self.block = 0

    # -- statements ------------------------------------------------------------------------------------------------

    def run(self, body: list[ast.stmt], scope: Scope) -> None:
        self.block += 1
        here = self.block
        for statement in body:
            self.block = max(self.block, here)
            self.statement(statement, scope, here)

    def statement(self, s: ast.stmt, scope: Scope, block: int) -> None:
        if isinstance(s, FUNCTIONS):
            self.function(s, Scope(dict(scope.orders), dict(scope.symbols), dict(scope.seeds), scope.owner))
        elif isinstance(s, ast.ClassDef):
            self.klass(s, scope)
        elif isinstance(s, ast.Assign | ast.AnnAssign) and s.value is not None:
            self.pairings(s.value, scope, block)
            for target in s.targets if isinstance(s, ast.Assign) else [s.target]:
                self.assign(target, s.value, scope)
        elif isinstance(s, ast.AugAssign):
            name = dotted(s.target)
            if name is not None:
                self.set(scope, name, union(scope.orders.get(name), self.order(s.value, scope)), f"{name}'{self.number()}")
        elif isinstance(s, ast.For | ast.AsyncFor):
            self.pairings(s.iter, scope, block)
            self.loop(s, scope)
            self.run([*s.body, *s.orelse], scope)
        elif isinstance(s, ast.If):
            other = scope.copy()
            self.pairings(s.test, scope, block)
            self.run(s.body, scope)
            self.run(s.orelse, other)
            for name in other.orders:
                scope.orders.setdefault(name, other.orders[name])
        elif isinstance(s, ast.With | ast.AsyncWith | ast.While | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                self.run(getattr(s, part, []), scope)
        elif isinstance(s, ast.Return) and s.value is not None:
            self.pairings(s.value, scope, block)
            self.handed(s.value, scope, block)
        elif isinstance(s, ast.Expr):
            self.in_place(s.value, scope)
            self.pairings(s.value, scope, block)
            if isinstance(s.value, ast.Yield) and s.value.value is not None:
                self.handed(s.value.value, scope, block)

    def function(self, f: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        arguments = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        for a in arguments:
            if a.arg == "self":
                continue
            self.set(scope, a.arg, None, f"{a.arg}'{self.number()}")
            if a.arg not in INDEXLIKE and f.name != "__getitem__":
                scope.orders[a.arg] = Order({f"arguments of {f.name}": ()}, frozenset((a.arg,)))
        self.run(f.body, scope)

    def klass(self, c: ast.ClassDef, scope: Scope) -> None:
        methods = [m for m in c.body if isinstance(m, FUNCTIONS)]
        inner = Scope(dict(scope.orders), dict(scope.symbols), dict(scope.seeds), c.name)
        for m in methods:
            if m.name in ("__init__", "setup", "prepare_data"):
                self.function(m, inner)
        for m in methods:
            if m.name not in ("__init__", "setup", "prepare_data"):
                self.function(m, Scope({k: v for k, v in inner.orders.items() if k.startswith("self.") or k in scope.orders}, dict(inner.symbols),
                                       dict(inner.seeds), c.name))

    def loop(self, s: ast.For | ast.AsyncFor, scope: Scope) -> None:
        names = [dotted(t) for t in s.target.elts] if isinstance(s.target, ast.Tuple) else [dotted(s.target)]
        iterated: ast.expr = s.iter
        if isinstance(iterated, ast.Call) and call_name(iterated) in ("enumerate", "tqdm") and iterated.args:
            if call_name(iterated) == "enumerate" and isinstance(s.target, ast.Tuple) and len(s.target.elts) == 2:
                inner = s.target.elts[1]
                names = [dotted(t) for t in inner.elts] if isinstance(inner, ast.Tuple) else [dotted(inner)]
            iterated = iterated.args[0]
        base = f"loop {s.lineno}"
        zipped = isinstance(iterated, ast.Call) and call_name(iterated) == "zip" and len(iterated.args) == len(names)
        for n in ast.walk(s.target):
            if isinstance(n, ast.Name):
                self.set(scope, n.id, None, f"{n.id}'{self.number()}")
        for position, name in enumerate(names):
            if name is None:
                continue
            order = self.order(iterated.args[position], scope) if zipped and isinstance(iterated, ast.Call) else None
            if zipped and isinstance(iterated, ast.Call) and (drawn := self.loaders.get(dotted(iterated.args[position]) or "")) is not None:
                order = Order({base: drawn}, frozenset((name,)))
            if order is None and len(names) > 1:
                order = Order({base: ()}, frozenset((name,)))
            if order is not None and len(names) != 1:
                scope.orders[name] = order

    def set(self, scope: Scope, name: str, order: Order | None, symbol: str) -> None:
        scope.symbols[name] = symbol if len(symbol) < 160 else f"{name}'{self.number()}"
        if order is None:
            scope.orders.pop(name, None)
        else:
            scope.orders[name] = order

    def assign(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            self.unpack(target.elts, value, scope)
            return
        name = dotted(target)
        if name is None:
            return
        if isinstance(value, ast.Call) and call_name(value) in RESEEDED:
            scope.seeds[name] = (ast.unparse(value), 0) if value.args or value.keywords else (f"unseeded {value.lineno}", 0)
        if isinstance(value, ast.Call) and call_name(value).endswith("DataLoader"):
            mixed = next((k.value for k in value.keywords if k.arg == "shuffle"), None)
            chance = isinstance(mixed, ast.Constant) and mixed.value is True
            self.loaders[name] = (self.draw(value, scope, "shuffle"),) if chance else ()
        order = self.order(value, scope)
        self.set(scope, name, Order(order.paths, frozenset((name,))) if order is not None else None, self.symbol(value, scope))

    def unpack(self, targets: list[ast.expr], value: ast.expr, scope: Scope) -> None:
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(targets):
            made = [(self.order(v, scope), self.symbol(v, scope)) for v in value.elts]
        elif isinstance(value, ast.Call):
            made = self.unpacked_call(value, len(targets), scope)
        else:
            inner = self.order(value, scope)
            made = [(inner or Order({f"rows {value.lineno}": ()}, frozenset()), f"part {i} of {value.lineno}:{value.col_offset}'{self.count}") for i in range(len(targets))]
            self.number()
        for t, (order, symbol) in zip(targets, made, strict=False):
            name = dotted(t)
            if name is not None:
                self.set(scope, name, Order(order.paths, frozenset((name,))) if order is not None else None, symbol)
            elif isinstance(t, ast.Tuple):
                for inner_target in t.elts:
                    if (inner_name := dotted(inner_target)) is not None:
                        self.set(scope, inner_name, Order({f"rows {value.lineno} {ast.unparse(t)}": ()}, frozenset((inner_name,))), f"{inner_name}'{self.number()}")

    def unpacked_call(self, call: ast.Call, n: int, scope: Scope) -> list[tuple[Order | None, str]]:
        name, line = call_name(call), call.lineno
        given = [self.order(a, scope) for a in call.args if not isinstance(a, ast.Starred)]
        symbol = [f"{self.symbol(call, scope)}[{i}]" for i in range(n)]
        if name == "train_test_split" and n == 2 * len(given):
            key = self.draw(call, scope, "split")
            return [(given[i // 2].then(f"{key} part {i % 2}") if given[i // 2] is not None else None, symbol[i]) for i in range(n)]  # type: ignore[union-attr]
        if name == "shuffle" and n == len(given):
            key = self.draw(call, scope, "shuffle")
            return [(o.then(key) if o is not None else None, s) for o, s in zip(given, symbol, strict=True)]
        if name in ("sort", "topk", "unique") or (name == "max" and n == 2):
            own = self.order(call.func.value, scope) if isinstance(call.func, ast.Attribute) else None
            own = own or (given[0] if given else None)
            key = f"sorted by {self.symbol(call, scope)}"
            self.lines.setdefault(key, line)
            return [(own.then(key) if own is not None and name == "sort" else None, symbol[0]), (None, f"index of {symbol[0]}")][:n]
        if name in ("map", "zip") and call.args:
            parts = [self.order(a.value if isinstance(a, ast.Starred) else a, scope) for a in call.args[name == "map":]]
            if name == "map" and isinstance(call.args[-1], ast.Tuple | ast.List):
                parts = [self.order(e, scope) for e in call.args[-1].elts]
            if len(parts) == n:
                return list(zip(parts, symbol, strict=True))
        return [(Order({f"call {line}:{call.col_offset}": ()}, frozenset()), s) for s in symbol]

    def in_place(self, value: ast.expr, scope: Scope) -> None:
        if not isinstance(value, ast.Call):
            return
        name, root = call_name(value), generator(value)
        if name in SEEDS and value.args:
            scope.seeds[root or "torch"] = (ast.unparse(value.args[0]), 0)
        elif name in ("shuffle", "sort", "reverse"):
            subject = value.func.value if name != "shuffle" and isinstance(value.func, ast.Attribute) else value.args[0] if value.args else None
            who = dotted(subject) if subject is not None else None
            key = self.draw(value, scope, "shuffle") if name == "shuffle" else f"{name}ed {self.symbol(value, scope)}"
            self.lines.setdefault(key, value.lineno)
            if who is not None and who in scope.orders:
                scope.orders[who] = scope.orders[who].then(key)
            if who is not None:
                scope.symbols[who] = f"{scope.symbols.get(who, who)}~{key}"

    # -- pairings --------------------------------------------------------------------------------------------------

    def pairings(self, e: ast.expr, scope: Scope, block: int) -> None:
        for call in ast.walk(e):
            if isinstance(call, ast.Call):
                name = call_name(call)
                if name == "zip" or name.endswith(("Dataset", "DataSet")):
                    args = [*call.args, *(k.value for k in call.keywords)]
                    if 2 <= len(args) <= 4 and any(labelish(a) for a in args[1:]):
                        target = next(a for a in reversed(args) if labelish(a))
                        self.meet(args[0], target, scope, call.lineno, block, "rows put together")
                elif (name in LOSSES or "loss" in name.lower() or "crit" in name.lower()) and len(call.args) >= 2 and name != "zip":
                    self.meet(call.args[0], call.args[1], scope, call.lineno, block, "loss")
            elif isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub):
                for a, b in ((call.left, call.right), (call.right, call.left)):
                    if isinstance(a, ast.Call | ast.Name) and labelish(b) and not labelish(a):
                        self.meet(a, b, scope, call.lineno, block, "difference")

    def handed(self, value: ast.expr, scope: Scope, block: int) -> None:
        """What a function returns or yields as input and target."""
        if isinstance(value, ast.Dict):
            parts = {str(k.value): v for k, v in zip(value.keys, value.values, strict=True) if isinstance(k, ast.Constant)}
            targets = [k for k in parts if labelish(ast.Name(k))]
            inputs = [k for k in parts if k not in targets]
            if targets and inputs:
                self.meet(parts[inputs[0]], parts[targets[0]], scope, value.lineno, block, "returned")
        elif isinstance(value, ast.Tuple) and 2 <= len(value.elts) <= 4:
            for x, y in pairs_of(value.elts):
                self.meet(x, y, scope, value.lineno, block, "returned")

    def meet(self, a: ast.expr, b: ast.expr, scope: Scope, line: int, block: int, how: str) -> None:
        x, y = self.order(a, scope), self.order(b, scope)
        if x is None or y is None:
            return
        verdict = compare(x, y)
        if verdict is True:
            self.agreed.append((block, ast.unparse(a)))
        elif verdict:
            extra_x, extra_y, base = verdict
            keys = [re.sub(r" part \d$", "", k) for k in (*extra_x, *extra_y)]
            at = [self.lines[k] for k in keys if k in self.lines]
            self.found.append(Mismatch(line, min(at, key=lambda n: (n > line, abs(line - n)), default=line), tuple(sorted(set(at))), extra_x, extra_y, base, how,
                                       ast.unparse(a), ast.unparse(b), block))


def pairs_of(parts: list[ast.expr]) -> list[tuple[ast.expr, ast.expr]]:
    """Inputs and targets among two to four values: ``x, y``, ``x, y, x2, y2``, ``x, x2, y, y2``, ``x, lengths, y``."""
    said = [labelish(p) for p in parts]
    if len(parts) == 4 and said[0] is False and said[1] and said[3] and not said[2]:
        return [(parts[0], parts[1]), (parts[2], parts[3])]
    if len(parts) == 4 and said[2] and said[3] and not said[0] and not said[1]:
        return [(parts[0], parts[2]), (parts[1], parts[3])]
    if len(parts) == 4 or said[0]:
        return []
    target = parts[-1] if said[-1] else parts[1]
    return [(parts[0], target)] if labelish(target) else []


def mismatches(module: ast.Module) -> Iterator[Mismatch]:
    """Pairs of input and target whose rows were ordered differently. A pair that is also used in agreement in the same block (mixed
    samples, contrast with other rows) is meant."""
    reader = Reader()
    try:
        reader.run(module.body, Scope())
    except RecursionError:
        return
    meant = set(reader.agreed)
    for found in reader.found:
        if (found.block, found.input) not in meant:
            yield found
