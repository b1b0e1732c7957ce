"""Which order the rows of a value are in, as far as the script's text tells: a small abstract interpretation of indexing, shuffling,
sorting and splitting.

Every value carries, for each source of rows it is made of, the list of reorderings since. Two values that are paired (as input and
target) and share a source must share the reorderings. What is not understood is unknown, and unknown never disagrees. Nothing is executed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from osler.rules.order_steps import (
    DRAWS,
    FRESH,
    LISTINGS,
    LOSSES,
    NOT_ROWS,
    SEEDS,
    STILL_ROWS,
    Mismatch,
    Order,
    Path,
    compare,
    labelish,
)
from osler.rules.script import FUNCTIONS, call_name, dotted

INDEXLIKE = frozenset(("idx", "index", "i", "j", "k", "item", "indices", "ids", "perm", "order", "n", "batch_size", "bs", "seed", "start", "end", "rng", "step"))
NO_ROWS = ("len", "range", "int", "float", "arange", "super", "print", "default_rng", "manual_seed")
WRAPPERS = frozenset(("DataFrame", "Series", "Tensor", "FloatTensor", "LongTensor", "Variable"))
RESEEDED = ("default_rng", "RandomState", "Random", "Generator", "manual_seed")


@dataclass
class Scope:
    """Variables of one run through a block."""

    orders: dict[str, Order] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, tuple[str, int]] = field(default_factory=dict)
    owner: str = ""

    def copy(self) -> Scope:
        return Scope(dict(self.orders), dict(self.symbols), dict(self.seeds), self.owner)


class Reader:
    """Reads one file and keeps what is paired against the grain."""

    def __init__(self) -> None:
        self.found: list[Mismatch] = []
        self.agreed: list[tuple[int, str]] = []
        self.lines: dict[str, int] = {}
        self.loaders: dict[str, Path] = {}
        self.count = 0
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

    def number(self) -> int:
        self.count += 1
        return self.count

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

    # -- expressions -----------------------------------------------------------------------------------------------

    def draw(self, call: ast.Call, scope: Scope, what: str) -> str:
        """A name for one draw of random numbers: two draws have the same name only where the same seed makes them equal."""
        state = next((k.value for k in call.keywords if k.arg in ("random_state", "seed")), None)
        if (isinstance(state, ast.Constant) and state.value is not None) or isinstance(state, ast.Name):
            others = sorted(f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords if k.arg not in ("random_state", "stratify"))
            key = f"random {what} {self.symbol(state, scope)} {' '.join(others)}"
        else:
            given = next((dotted(k.value) for k in call.keywords if k.arg == "generator"), None)
            inline = call.func.value if isinstance(call.func, ast.Attribute) else None
            root = given or generator(call) or "torch"
            if isinstance(inline, ast.Call) and call_name(inline) in RESEEDED and inline.args:
                key = f"random {what} {ast.unparse(inline)}"
            elif root in scope.seeds:
                text, n = scope.seeds[root]
                scope.seeds[root] = (text, n + 1)
                key = f"random {what} {text} number {n}"
            else:
                key = f"random {what} at {call.lineno}:{call.col_offset}"
        self.lines.setdefault(key, call.lineno)
        return key

    def symbol(self, e: ast.expr | None, scope: Scope) -> str:
        """A text that is equal for equal values: names replaced by what they were last set to, draws by their names."""
        if e is None:
            return ""
        if isinstance(e, ast.Name | ast.Attribute) and (name := dotted(e)) is not None and name in scope.symbols:
            return scope.symbols[name]
        if isinstance(e, ast.Call) and call_name(e) in DRAWS and not any(self.order(a, scope) for a in e.args):
            return self.draw(e, scope, "order")
        if isinstance(e, ast.Call) and call_name(e) in FRESH and self.count_draw(e, scope):
            return f"numbers {self.number()}"
        if isinstance(e, ast.Constant | ast.Name):
            return ast.unparse(e)
        if isinstance(e, ast.Slice):
            return ":".join(self.symbol(part, scope) for part in (e.lower, e.upper, e.step))
        parts = [self.symbol(c, scope) if isinstance(c, ast.expr) else ast.unparse(c.value) if isinstance(c, ast.keyword) else ""
                 for c in ast.iter_child_nodes(e) if not isinstance(c, ast.expr_context)]
        operation = type(e.op).__name__ if isinstance(e, ast.BinOp | ast.UnaryOp) else call_name(e) if isinstance(e, ast.Call) else \
            e.attr if isinstance(e, ast.Attribute) else type(e).__name__
        return f"{operation}({','.join(parts)})"

    def count_draw(self, e: ast.Call, scope: Scope) -> bool:
        root = generator(e) or "torch"
        if root in scope.seeds:
            scope.seeds[root] = (scope.seeds[root][0], scope.seeds[root][1] + 1)
        return True

    def order(self, e: ast.expr | None, scope: Scope) -> Order | None:
        """The rows of an expression; ``None`` where they are not known."""
        if isinstance(e, ast.Name | ast.Attribute):
            name = dotted(e)
            if name in scope.orders:
                return scope.orders[name]
            if name is not None and name.startswith("self.") and scope.owner and name not in scope.symbols:
                return Order({f"attributes of {scope.owner}": ()}, frozenset((name,)))
            if isinstance(e, ast.Attribute) and e.attr not in ("T", "mT", "shape", "size", "ndim", "dtype", "device", "columns", "index"):
                return self.order(e.value, scope)
            return None
        if isinstance(e, ast.Subscript):
            return self.indexed(e, scope)
        if isinstance(e, ast.Call):
            return self.called(e, scope)
        if isinstance(e, ast.BinOp):
            return union(self.order(e.left, scope), self.order(e.right, scope))
        if isinstance(e, ast.Compare):
            return union(self.order(e.left, scope), *(self.order(c, scope) for c in e.comparators))
        if isinstance(e, ast.UnaryOp):
            return self.order(e.operand, scope)
        if isinstance(e, ast.IfExp):
            return self.order(e.body, scope) or self.order(e.orelse, scope)
        if isinstance(e, ast.ListComp | ast.GeneratorExp) and len(e.generators) == 1:
            return self.comprehension(e, scope)
        return None

    def comprehension(self, e: ast.ListComp | ast.GeneratorExp, scope: Scope) -> Order | None:
        g = e.generators[0]
        over = self.order(g.iter, scope)
        inner = scope.copy()
        text = self.symbol(g.iter, scope)
        for n in ast.walk(g.target):
            if isinstance(n, ast.Name):
                inner.orders.pop(n.id, None)
                inner.symbols[n.id] = f"each of {text}" if isinstance(g.target, ast.Name) else f"{n.id} of {text}"
        made = self.order(e.elt, inner)
        if made is None or (over is not None and all(b.startswith(("made ", "call ")) and b not in over.paths for b in made.paths)):
            made = over
        return made.then(*(f"where {self.symbol(c, inner)}" for c in g.ifs)) if made is not None else None

    def indexed(self, e: ast.Subscript, scope: Scope) -> Order | None:
        value = e.value
        if isinstance(value, ast.Attribute) and value.attr in ("loc", "iloc"):
            value = value.value
        own, index = self.order(value, scope), e.slice
        if isinstance(index, ast.Tuple):
            index = index.elts[0] if index.elts else index
        if isinstance(index, ast.Constant) and (index.value is Ellipsis or index.value is None or isinstance(index.value, str)):
            return own
        if isinstance(index, ast.List) and all(isinstance(v, ast.Constant) and isinstance(v.value, str) for v in index.elts):
            return own
        if isinstance(index, ast.Slice) and index.lower is None and index.upper is None:
            if isinstance(index.step, ast.UnaryOp) and own is not None:
                self.lines.setdefault("reversed", e.lineno)
                return own.then("reversed")
            return own if index.step is None else own.then(f"rows {self.symbol(index, scope)}") if own is not None else None
        if isinstance(index, ast.Constant):
            return None
        through = self.order(index, scope) if not isinstance(index, ast.Slice) else None
        if own is None:
            return through
        key = f"rows {self.symbol(index, scope)}"
        self.lines.setdefault(key, e.lineno)
        made = own.then(key)
        if through is not None:
            mask = isinstance(index, ast.Compare | ast.UnaryOp | ast.BinOp) or key.startswith(("rows Compare(", "rows is"))
            made = made if mask else Order({**through.paths, **made.paths}, own.names)
        return made

    def called(self, e: ast.Call, scope: Scope) -> Order | None:
        name = call_name(e)
        method = self.order(e.func.value, scope) if isinstance(e.func, ast.Attribute) else None
        given = [self.order(a.value if isinstance(a, ast.Starred) else a, scope) for a in e.args]
        if name in LISTINGS:
            return Order({"files": ()}, frozenset())
        if name in DRAWS and given and given[0] is not None:
            return given[0].then(self.draw(e, scope, "order"))
        if name in DRAWS or (name[:1].isupper() and name not in WRAPPERS):
            return None
        if name == "shuffle" and given and given[0] is not None:
            return given[0].then(self.draw(e, scope, "shuffle"))
        if name in ("index_select", "take", "take_along_axis", "gather"):
            subject = method or (given[0] if given else None)
            key = f"rows {self.symbol(e.args[-1], scope)}" if e.args else "rows"
            self.lines.setdefault(key, e.lineno)
            return subject.then(key) if subject is not None and name in ("index_select", "take") else None
        if name in NOT_ROWS:
            return (method or next((g for g in given if g is not None), None)) if keeps_rows(e) else None
        subject = method or next((g for g in given if g is not None), None)
        if name in ("roll", "flip", "flipud", "sort", "sorted", "repeat_interleave", "repeat", "tile", "expand"):
            step = self.rearranged(name, e, scope, method is not None)
            return subject.then(step) if subject is not None and step else subject
        if name in ("cat", "concat", "concatenate", "vstack", "hstack", "append", "stack") and e.args and isinstance(e.args[0], ast.List | ast.Tuple):
            return self.joined(e, scope)
        if name in ("int", "float", "bool", "str") and given:
            return given[0]
        if name in FRESH or (method is None and not any(given)):
            self.count_draw(e, scope)
            return None if name in NO_ROWS else Order({f"made {e.lineno}:{e.col_offset}": ()}, frozenset())
        return union(method, *given)

    def rearranged(self, name: str, e: ast.Call, scope: Scope, method: bool) -> str:
        """The reordering that a library function makes along the rows, empty where it works along another axis."""
        rest = e.args if method else e.args[1:]
        axis = next((k.value for k in e.keywords if k.arg in ("dims", "dim", "axis")), rest[1] if name == "roll" and len(rest) > 1 else None)
        if axis is not None and not (isinstance(axis, ast.Constant) and axis.value == 0) and "0" not in ast.unparse(axis):
            return ""
        if name == "flip" and axis is None and rest and "0" not in ast.unparse(rest[0]):
            return ""
        if name in ("repeat", "expand") and method and rest and ast.unparse(rest[0]) in ("1", "-1"):
            return ""
        if name == "expand" or (False):
            return ""
        what = {"repeat": "tiled" if method and len(rest) != 1 else "repeated", "tile": "tiled", "repeat_interleave": "repeated"}.get(name, name)
        if name == "repeat" and method and len(rest) == 1:
            what = "tiled"
        amount = ",".join(self.symbol(a, scope) for a in rest[:1]) + ",".join(f"{k.arg}={ast.unparse(k.value)}" for k in e.keywords if k.arg in ("key", "reverse", "shifts"))
        key = f"{what} {amount}"
        self.lines.setdefault(key, e.lineno)
        return key

    def joined(self, e: ast.Call, scope: Scope) -> Order | None:
        axis = next((k.value for k in e.keywords if k.arg in ("dim", "axis")), e.args[1] if len(e.args) > 1 else None)
        parts = [self.order(p, scope) for p in e.args[0].elts]  # type: ignore[attr-defined]
        known = [p for p in parts if p is not None]
        if (axis is not None and not (isinstance(axis, ast.Constant) and axis.value == 0)) or call_name(e) in ("hstack",):
            return union(*parts)
        if len(known) != len(parts) or not parts or call_name(e) == "stack":
            return union(*parts) if call_name(e) == "stack" else None
        shared = set.intersection(*(set(p.paths) for p in known))
        paths: dict[str, Path | None] = {}
        for base in shared:
            first = known[0].paths[base]
            if all(p.paths[base] == first for p in known) and first is not None:
                paths[base] = (*first, f"tiled {len(known)}")
        self.lines.setdefault(f"tiled {len(known)}", e.lineno)
        for pick in itertools.islice(itertools.product(*(sorted(p.paths) for p in known)), 16):
            paths["|".join(f"{b}{known[i].paths[b]}" for i, b in enumerate(pick))] = ()
        return Order(paths, frozenset())

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
            parts_ = value.elts
            target = parts_[-1] if labelish(parts_[-1]) else parts_[1]
            if labelish(target) and target is not parts_[0]:
                self.meet(parts_[0], target, scope, value.lineno, block, "returned")

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


def union(*orders: Order | None) -> Order | None:
    """Rows of something computed row by row from several values; sources they order differently become unknown."""
    known = [o for o in orders if o is not None]
    if not known:
        return None
    paths: dict[str, Path | None] = {}
    for o in known:
        for base, path in o.paths.items():
            paths[base] = path if base not in paths or paths[base] == path else None
    return Order(paths, frozenset().union(*(o.names for o in known)))


def generator(call: ast.Call) -> str | None:
    """Who draws: ``np``, ``torch``, ``random`` or the variable of a generator."""
    node: ast.AST = call.func
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) and not isinstance(call.func, ast.Name) else None


def keeps_rows(call: ast.Call) -> bool:
    """A reduction along another axis than the rows."""
    if call_name(call) not in STILL_ROWS:
        return False
    given = [*call.args, *(k.value for k in call.keywords if k.arg in ("dim", "axis"))]
    return any((isinstance(g, ast.Constant) and g.value == 1) or (isinstance(g, ast.UnaryOp) and ast.unparse(g) == "-1") for g in given)


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
