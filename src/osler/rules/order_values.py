"""The rows of an expression: what indexing, shuffling, sorting and joining do to the order of rows. ``row_order`` reads statements with it."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass, field

from osler.rules.order_steps import DRAWS, FRESH, LISTINGS, NOT_ROWS, STILL_ROWS, VIA, Order, Path
from osler.rules.script import call_name, dotted

INDEXLIKE = frozenset(("idx", "index", "i", "j", "k", "item", "indices", "ids", "perm", "order", "n", "batch_size", "bs", "seed", "start", "end", "rng", "step"))
NO_ROWS = ("len", "range", "int", "float", "arange", "super", "print", "default_rng", "manual_seed")
WRAPPERS = frozenset(("DataFrame", "Series", "Tensor", "FloatTensor", "LongTensor", "Variable"))
COLUMNS = re.compile(r"'[^',():]*'[,)]|columns|index\(|ListComp\((c|col|name|f)\b")
"""A choice of columns by name, not of rows."""
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


class Values:
    """Evaluates expressions; ``lines`` keeps where each reordering stands, ``loaders`` the order of loaders by name."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.loaders: dict[str, Path] = {}
        self.count = 0

    def number(self) -> int:
        self.count += 1
        return self.count

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
        if COLUMNS.search(key):
            return own
        self.lines.setdefault(key, e.lineno)
        made = own.then(key)
        if through is not None:
            mask = isinstance(index, ast.Compare | ast.UnaryOp | ast.BinOp) or key.startswith(("rows Compare(", "rows is"))
            made = made if mask else Order({**{f"{VIA}{b.removeprefix(VIA)}": p for b, p in through.paths.items()}, **made.paths}, own.names)
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
        if method is not None and name == "sample":
            return method.then(self.draw(e, scope, "order"))
        if method is not None and name in ("sort_values", "sort_index", "dropna", "drop_duplicates", "query", "nlargest", "nsmallest"):
            key = f"{name} {','.join(self.symbol(a, scope) for a in e.args)} {','.join(ast.unparse(k) for k in e.keywords)}"
            self.lines.setdefault(key, e.lineno)
            return method.then(key)
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
