"""Questions to the fact ``growth``: which containers kept growing, and which line of the user's makes them grow."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, LOOPS, Function, around, call_name, calls, parse, training_functions, trains
from osler.rules.stack_questions import is_step_loop, step_loops

GROWS = frozenset(("append", "extend", "add", "update", "appendleft", "extendleft", "insert", "setdefault", "put"))
ONCE = frozenset(("__init__", "__post_init__", "__new__", "main", "setup", "build", "__call__", "forward"))
SHRINKS = frozenset(("clear", "pop", "popleft", "popitem", "remove", "discard"))
JOINS = frozenset(("cat", "concat", "concatenate", "append", "vstack", "hstack", "stack", "row_stack", "r_"))


@dataclass(frozen=True, slots=True)
class Container:
    """A container that was longer at the last look than at the first."""

    name: str
    type: str
    where: Location | None
    steps: tuple[int, ...]
    lens: tuple[int, ...]
    element: str
    bytes: int
    grad: bool
    maxlen: int | None

    @property
    def variable(self) -> str:
        """The last name of the path: ``seen`` for ``train.seen``, ``history`` for ``history['out']``."""
        return re.sub(r"\[[^\]]*\]", "", self.name).split(".")[-1]

    @property
    def rate(self) -> float:
        """Elements a step."""
        span = self.steps[-1] - self.steps[0]
        return (self.lens[-1] - self.lens[0]) / span if span > 0 else 0.0

    @property
    def weight(self) -> int:
        """Bytes that the growth took, by the size of the newest element."""
        return (self.lens[-1] - self.lens[0]) * max(self.bytes, 1)

    @property
    def steady(self) -> bool:
        """It never shrank, and grew in the last part of the run about as fast as before."""
        pairs = sorted(dict(zip(self.steps, self.lens, strict=True)).items())
        if len(pairs) < 3 or any(b[1] < a[1] for a, b in itertools.pairwise(pairs)):
            return False
        last = pairs[-1]
        middle = max((p for p in pairs if p[0] <= (pairs[0][0] + last[0]) * 0.6), default=pairs[0])
        late = (last[1] - middle[1]) / max(last[0] - middle[0], 1)
        return late >= 0.4 * self.rate > 0

    @property
    def often(self) -> int:
        """At how many looks it was longer than at the look before."""
        return sum(b > a for a, b in zip(self.lens, self.lens[1:], strict=False))


def containers(window: Window) -> list[Container]:
    fact = window.last("growth")
    rows: list[dict[str, Any]] = list(fact.get("containers") or ()) if fact is not None else []
    return [Container(str(r.get("name")), str(r.get("type")), Location.from_json(r.get("where")), tuple(r.get("steps") or ()), tuple(r.get("lens") or ()),
                      str(r.get("element") or ""), int(r.get("bytes") or 0), bool(r.get("grad")), r.get("maxlen")) for r in rows if len(r.get("steps") or ()) >= 2]


def resident(window: Window) -> tuple[float, float] | None:
    """Resident memory in MB at the first look and at the last."""
    fact = window.last("growth")
    rss = list(fact.get("rss") or ()) if fact is not None else []
    return (rss[0] / 2**20, rss[-1] / 2**20) if len(rss) >= 2 and rss[0] else None


def wasted(window: Window) -> str:
    """Severity of kept memory: ``wasteful``, and ``fatal`` where the run ended for want of memory."""
    said = any("out of memory" in str(f.get("message")).lower() or f.get("type") == "MemoryError" for f in window.facts("exception"))
    return "fatal" if said or (window.end is not None and window.end.out_of_memory) else "wasteful"


def last_name(node: ast.AST | None) -> str | None:
    """``seen`` for ``self.seen``, ``history`` for ``history["out"]``, ``x`` for ``x``."""
    while isinstance(node, ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setdefault", "get", "__getitem__"):
        return last_name(node.func.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


@dataclass(frozen=True, slots=True)
class Site:
    """A statement that makes a container longer."""

    at: Location
    value: ast.AST | None
    function: str
    call: ast.AST


def sites(window: Window, name: str, depth: int = 1) -> list[Site]:
    """Statements that make the variable or attribute of that name longer, also as a parameter of a function of the user's."""
    found: list[Site] = []
    for file, text in window.sources.items():
        module = parse(text)
        if module is None:
            continue
        for node in ast.walk(module):
            site = _site(node, name)
            if site is not None:
                line, value = site
                statements = around(window, Location(file, line))
                function = next((s.name for s in reversed(statements) if isinstance(s, FUNCTIONS)), "<module>")
                found.append(Site(Location(file, line, function), value, function, node))
        if depth:
            functions = {n.name: n for n in ast.walk(module) if isinstance(n, FUNCTIONS)}
            for call in calls(module):
                function_node = functions.get(call_name(call))
                if function_node is None:
                    continue
                for parameter in _given(function_node, call, name):
                    if parameter != name:
                        found += [s for s in sites(window, parameter, 0) if s.function == function_node.name]
    return found


def _site(node: ast.AST, name: str) -> tuple[int, ast.AST | None] | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWS and last_name(node.func.value) == name:
        return node.lineno, node.args[-1] if node.args else None
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and last_name(target) == name:
                return node.lineno, node.value
            if last_name(target) == name and not isinstance(target, ast.Subscript) and joins(node.value, name):
                return node.lineno, node.value
    if isinstance(node, ast.AugAssign) and last_name(node.target) == name:
        return node.lineno, node.value
    return None


def joins(value: ast.AST, name: str) -> bool:
    """``x + [y]``, ``[*x, y]``, ``torch.cat([x, y])``, ``np.append(x, y)``: the old content and more."""
    if isinstance(value, ast.IfExp):
        return joins(value.body, name) or joins(value.orelse, name)
    if isinstance(value, ast.BinOp):
        return name in (last_name(value.left), last_name(value.right)) or joins(value.left, name)
    if isinstance(value, ast.List | ast.Tuple):
        return any(isinstance(e, ast.Starred) and last_name(e) == name for e in value.elts)
    if isinstance(value, ast.Call) and call_name(value) in JOINS:
        inside = [n for a in value.args for n in ([a, *a.elts] if isinstance(a, ast.List | ast.Tuple) else [a])]
        receiver = value.func.value if isinstance(value.func, ast.Attribute) else None
        return any(last_name(n) == name for n in (*inside, receiver))
    return False


def _given(function: Function, call: ast.Call, name: str) -> Iterator[str]:
    parameters = [a.arg for a in function.args.args]
    shift = int(bool(parameters) and parameters[0] in ("self", "cls") and isinstance(call.func, ast.Attribute))
    for position, given in enumerate(call.args):
        if last_name(given) == name and isinstance(given, ast.Name | ast.Attribute) and position + shift < len(parameters):
            yield parameters[position + shift]
    for keyword in call.keywords:
        if keyword.arg and last_name(keyword.value) == name:
            yield keyword.arg


def shrinkings(window: Window, name: str) -> Iterator[Location]:
    """Lines that empty, shorten, renew or limit the container of that name while the program runs."""
    for file, text in window.sources.items():
        module = parse(text)
        if module is None:
            continue
        for node in ast.walk(module):
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHRINKS and last_name(node.func.value) == name) or (isinstance(node, ast.Delete) and any(isinstance(t, ast.Subscript) and last_name(t) == name for t in node.targets)) or (isinstance(node, ast.Compare) and any(isinstance(n, ast.Call) and call_name(n) == "len" and n.args and last_name(n.args[0]) == name
                                                       for n in ast.walk(node))):
                yield Location(file, node.lineno)
        for block in _moving(text):
            line = renews(block, name)
            if line:
                yield Location(file, line)


def bounded(window: Window, name: str) -> bool:
    return next(shrinkings(window, name), None) is not None


def bounded_each_step(window: Window, name: str) -> bool:
    """It is emptied within every training step (as an episode's log-probabilities are), not only once an epoch."""
    for at in shrinkings(window, name):
        statements = around(window, at)
        training = training_functions(window, at.file)
        function = next((s for s in reversed(statements) if isinstance(s, FUNCTIONS)), None)
        inner = [s for s in statements if isinstance(s, LOOPS)]
        if any(is_step_loop(window, at.file, loop) and at.line >= loop.lineno for loop in inner[-1:] + inner[:-1] if isinstance(loop, LOOPS)):
            return True
        if function is not None and (function.name in training and not any(isinstance(n, LOOPS) and trains(n, training) for n in ast.walk(function))):
            return True
        if function is not None and any(call_name(c) == function.name for _, loop in step_loops(window) for c in calls(loop)):
            return True
    return False


@lru_cache(maxsize=64)
def _moving(text: str) -> tuple[ast.AST, ...]:
    """Blocks that run again and again: loops, functions called in one (or by such a function), and those that only a library calls."""
    module = parse(text)
    if module is None:
        return ()
    functions = [n for n in ast.walk(module) if isinstance(n, FUNCTIONS)]
    loops: list[ast.AST] = [n for n in ast.walk(module) if isinstance(n, LOOPS)]
    called = {call_name(c) for c in calls(module)}
    moving = {f.name for f in functions if f.name not in called and f.name not in ONCE}
    blocks = loops
    for _ in range(4):
        inside = {call_name(c) for b in (*blocks, *(f for f in functions if f.name in moving)) for c in calls(b)}
        more = moving | {f.name for f in functions if f.name in inside and f.name not in ONCE}
        if more == moving:
            break
        moving = more
    return (*loops, *(f for f in functions if f.name in moving))


def renews(block: ast.AST, name: str) -> int:
    """Line of an assignment of something fresh to the name: ``x = []``, ``self.x = {}``, ``x[:] = ...``, ``x = x[-100:]``; else 0."""
    for node in ast.walk(block):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            flat = [e for t in (node.targets if isinstance(node, ast.Assign) else [node.target]) for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            for target in flat:
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Slice) and last_name(target) == name:
                    return node.lineno
                if not isinstance(target, ast.Subscript) and last_name(target) == name and not joins(node.value, name) and not lazily(block, node, name) \
                        and not (isinstance(node.value, ast.BinOp | ast.Call) and name in _read(node.value)):
                    return node.lineno
    return 0


def lazily(block: ast.AST, node: ast.AST, name: str) -> bool:
    """``if x is None: x = ...``: made once, at first use."""
    return any(isinstance(n, ast.If) and node in n.body and name in _read(n.test) for n in ast.walk(block))


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def keyed_by_index(window: Window, found: list[Site]) -> bool:
    """Every site stores under a parameter of its function (``cache[idx] = ...`` in ``__getitem__``): at most one entry an item."""
    for site in found:
        node = site.call
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript) or not isinstance(node.targets[0].slice, ast.Name):
            return False
        statements = around(window, site.at)
        function = next((s for s in reversed(statements) if isinstance(s, FUNCTIONS)), None)
        if function is None or node.targets[0].slice.id not in [a.arg for a in function.args.args]:
            return False
    return bool(found)

