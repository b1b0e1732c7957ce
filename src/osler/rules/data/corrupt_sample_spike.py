from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.loaders import TRAIN, loaders, roles
from osler.rules.numerics.nonfinite_input import source as data_source
from osler.rules.script import FUNCTIONS, assignment, call_name, constant, root, tree
from osler.rules.spikes import Spikes, spikes

SUSPICIOUS = re.compile(r"corrupt|bad|broken|glitch|outlier|spike|absurd|saturat|wrong|sentinel|missing|unit|sensor|fault|garbage|overflow|invalid", re.I)
BIG = 40.0


@rule("corrupt-sample-spike", "data")
def check(window: Window, *, times: float = 5.0, gap: float = 20.0, huge: float = 10.0, alone: float = 200.0) -> Iterator[Finding | NotChecked]:
    """One absurd sample makes one batch spike.

    **What it is.** A row with a value of another world: a sensor at its limit, a wrong unit, a sentinel such as 99999, a damaged file. Its batch
    has a loss and a gradient many times those of the others, and again in each epoch.

    **How it is seen.** The data first: all training rows are read in a forked copy; a few rows (at most 2 %) lie beyond a gap, `gap` times as far out as
    the next one, in inputs or targets. And the loss: single steps stand `times` above the steps around them. Both are needed. Where rows
    cannot be read (a stream), the batch of a spike is: one of its rows is `alone` times as large as its median row. Failing that, a line that writes huge
    numbers into data counts if several lone spikes are `huge` times the steps around.

    **Why it matters.** One such step undoes hundreds of others, Adam's second moment remembers it for a thousand steps, and normalisation
    constants drawn from these data squeeze everything else to a point.

    **What to do.** Look at the rows named; drop or repair them where the data are read, or clip by quantiles. Clipping gradients hides it.

    **When this is wrong.** Heavy tails (their extremes follow one another without a gap), rare but real events, hard examples: their loss spikes, their
    values do not stand alone. Warm restarts and loss terms that are switched on spike without such rows.

    **Source.** Handbook B §11, in its order: data, hardware, framework, algorithm.
    """
    jumps = spikes(window, times)
    facts = [f for f in window.facts("experiment") if f.get("name") == "absurd-rows"]
    if jumps is None:
        yield NotChecked("corrupt-sample-spike", "the loss was not seen at enough steps")
        return
    read = any(f.get("name") == "label-dependence" and int(f.get("loader", -1)) >= 0 for f in window.facts("experiment"))
    served = [] if read else [f for f in window.facts("spike") if max(float(f.get("row_ratio") or 0), float(f.get("target_ratio") or 0)) >= alone]
    if facts and (len(jumps.steps) >= 1 or jumps.lost):
        yield from by_rows(window, facts[-1], jumps)
    elif served and len(jumps.steps):
        yield from by_batch(window, served, jumps)
    elif len(jumps.steps) >= 2 and (jumps.alone & (jumps.ratio > huge)).sum() >= 2 and len(jumps.steps) <= 0.1 * jumps.n:
        at = written(window, strict=True)
        if at is not None:
            yield Finding("corrupt-sample-spike", "suspected", "harmful", f"Single batches spike to {float(np.max(jumps.ratio)):.3g} times the loss around, and huge numbers are written into the data",
                          f"Drop or repair these values, at {quoted(window, at, 'the data')}.", Where.at(at), first_step=int(jumps.steps[0]), last_step=int(jumps.steps[-1]),
                          evidence=(seen(jumps),), explains=SPOILED)


SPOILED = ("loss-spikes", "loss-diverged", "exploding-gradients", "lr-too-high", "loss-nan", "nonfinite-gradient", "input-scale", "target-scale")


def seen(jumps: Spikes) -> Evidence:
    shown = ", ".join(str(int(s)) for s in jumps.steps[:6])
    return Evidence(f"loss at steps {shown}{', …' if len(jumps.steps) > 6 else ''}: {float(np.median(jumps.ratio)):.3g} times the steps around (median of {len(jumps.steps)} spikes)",
                    "steps/loss", float(np.median(jumps.ratio)), 5.0, jumps.n)


def by_rows(window: Window, fact: Fact, jumps: Spikes) -> Iterator[Finding]:
    count, total = int(fact.get("count") or 1), int(fact.get("total") or 0)
    rows = [int(r) for r in fact.get("rows") or ()]
    ends = [float(v) for v in (fact.get("low"), fact.get("high")) if v is not None]
    worst = max(ends, key=abs, default=math.nan)
    what = "target" if fact.get("what") == "target" else "value"
    at = written(window, strict=False, rows=frozenset(rows)) or data_source(window) or dataset_line(window) or named_line(window, fact) or training_line(window)
    who = f"Row {rows[0]}" if len(rows) == 1 else f"{count} of {total} training rows"
    yield Finding(
        "corrupt-sample-spike", "measured", "harmful",
        f"{who} hold{'s' if len(rows) == 1 else ''} a {what} of {worst:.3g}; all others lie in {float(fact.get('usual_low') or 0):.3g} … {float(fact.get('usual_high') or 0):.3g}",
        f"Look at {'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows[:8]))}: drop or repair {'it' if len(rows) == 1 else 'them'} where the data are made, at {quoted(window, at, 'the data')}.",
        Where.at(at, rows=tuple(rows[:20])), first_step=int(jumps.steps[0]) if len(jumps.steps) else None, last_step=int(jumps.steps[-1]) if len(jumps.steps) else None,
        evidence=(Evidence(f"{count} of {fact.get('seen')} rows lie {float(fact.get('extent') or 0):.3g} times the usual extent of their column away, the next one {float(fact.get('rest') or 0):.3g} times",
                           "experiment/absurd-rows", float(fact.get("extent") or 0), 20.0 * max(float(fact.get("rest") or 0), 1.0), int(fact.get("seen") or 0)),
                  *((seen(jumps),) if len(jumps.steps) else ())), explains=SPOILED)


def by_batch(window: Window, facts: list[Fact], jumps: Spikes) -> Iterator[Finding]:
    fact = facts[0]
    side, ratio = ("input", float(fact.get("row_ratio") or 0)) if float(fact.get("row_ratio") or 0) >= float(fact.get("target_ratio") or 0) else ("target", float(fact.get("target_ratio") or 0))
    at = written(window, strict=False) or dataset_line(window) or data_source(window) or fact.at
    yield Finding("corrupt-sample-spike", "measured", "harmful", f"In the batch of a loss spike one row's {side} is {ratio:.3g} times as large as that of the others",
                  f"Drop or repair such rows where the data are read, at {quoted(window, at, 'the data')}.", Where.at(at), first_step=int(jumps.steps[0]), last_step=int(jumps.steps[-1]),
                  evidence=(Evidence(f"step {fact.step}: loss {float(fact.get('loss') or 0):.3g} after {float(fact.get('usual') or 0):.3g}; row {fact.get('row')} of the batch reaches {float(fact.get('largest') or 0):.3g}",
                                     "spike", ratio, 20.0, len(facts)), seen(jumps)), explains=SPOILED)


# -- the line -------------------------------------------------------------------------------------------------------


def written(window: Window, strict: bool, rows: frozenset[int] = frozenset()) -> Location | None:
    """The line that puts an absurd value into the data: it names one of the rows, or stores at chosen rows, or stands under a condition on the
    row number, with a huge number."""
    best: tuple[int, Location] | None = None
    for file in window.sources:
        module = tree(window, file)
        if module is None:
            continue
        parents = {child: node for node in ast.walk(module) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AugAssign):
                target, value = node.target, node.value
            elif isinstance(node, ast.Return) and node.value is not None:
                target, value = node.value, node.value
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and call_name(node.value) not in ("print", "backward", "step"):
                target, value = node.value.func, node.value
            else:
                continue
            exact = rows and not isinstance(node, ast.Return) and any(isinstance(n, ast.Constant) and type(n.value) is int and n.value in rows and n.value > 2 for n in ast.walk(node))
            size = largest(window, file, value, node.lineno)
            picked = isinstance(target, ast.Subscript) and not isinstance(node, ast.Return) and not isinstance(target.slice, ast.Slice)
            if strict and not scaled(window, file, node):
                continue
            under = condition(node, parents)
            words = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | ({n.id for n in ast.walk(under) if isinstance(n, ast.Name)} if under is not None else set())
            named = any(SUSPICIOUS.search(w) for w in words)
            tested = under is not None and any(isinstance(n, ast.Constant) and n.value in rows and n.value > 2 for n in ast.walk(under) if isinstance(n, ast.Constant) and type(n.value) is int)
            if not (exact or tested or (size >= BIG and (picked or under is not None)) or (named and picked and not strict)):
                continue
            score = 4 * bool(exact) + 3 * tested + 2 * (size >= BIG) + 2 * picked + (under is not None) + 2 * named
            if best is None or score > best[0]:
                best = (score, Location(file, node.lineno))
    return best[1] if best is not None else None


def scaled(window: Window, file: str, node: ast.AST) -> bool:
    """The statement multiplies data by a huge number, or puts one in their place."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Mult | ast.Div) and largest(window, file, node.value, node.lineno) >= BIG
    if not isinstance(node, ast.Assign):
        return False
    value, base = node.value, root(node.targets[0])
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return root(value.left) == base and largest(window, file, value.right, node.lineno) >= BIG
    number = constant(window, file, value, node.lineno)
    return isinstance(node.targets[0], ast.Subscript) and isinstance(number, int | float) and abs(number) >= 1000


def largest(window: Window, file: str, value: ast.expr, line: int) -> float:
    """The largest factor or constant of an expression, also 1/x of a tiny one."""
    found = 0.0
    for n in ast.walk(value):
        number = constant(window, file, n, line) if isinstance(n, ast.Constant | ast.Name) else None
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow) and isinstance(n.left, ast.Constant) and isinstance(n.right, ast.Constant) \
                and isinstance(n.left.value, int | float) and isinstance(n.right.value, int | float) and abs(n.right.value) < 40:
            number = n.left.value ** n.right.value
        if isinstance(n, ast.Attribute) and n.attr in ("max", "inf"):
            number = 1e9
        if isinstance(number, int | float) and not isinstance(number, bool) and number:
            found = max(found, abs(float(number)))
    return found


def condition(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.expr | None:
    """The test of an ``if`` around the statement, inside the same function: a comparison of a row or step number."""
    here: ast.AST | None = parents.get(node)
    while here is not None and not isinstance(here, FUNCTIONS):
        if isinstance(here, ast.If) and any(isinstance(n, ast.Compare) for n in ast.walk(here.test)) and "__name__" not in ast.unparse(here.test):
            prints = all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and call_name(s.value) in ("print", "append") for s in here.body)
            return None if prints else here.test
        here = parents.get(here)
    return None


def dataset_line(window: Window) -> Location | None:
    role = roles(window)
    for index, fact in loaders(window).items():
        if role.get(index, TRAIN) == TRAIN and (at := Location.from_json(fact.get("dataset_at"))) is not None:
            return at
    return None


def named_line(window: Window, fact: Fact) -> Location | None:
    """Where the array of the rows was made: back through slices and conversions to the first value that is no other variable."""
    name, found = str(fact.get("source") or ""), None
    for file in window.sources:
        line = 10**9
        for _ in range(4):
            made = assignment(window, file, name, line)
            if made is None:
                break
            found, line = Location(file, made.lineno), made.lineno
            value = getattr(made, "value", None)
            if isinstance(made, ast.Assign) and isinstance(made.targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
                value = next((v for t, v in zip(made.targets[0].elts, value.elts, strict=False) if isinstance(t, ast.Name) and t.id == name), None)
            name = root(value) or ""
        if found is not None:
            return found
    return None


def training_line(window: Window) -> Location | None:
    criterion = next((f for f in window.facts("criterion") if f.get("phase") == 0), None)
    if criterion is None or criterion.at is None:
        return None
    from osler.rules.script import around, origin
    inside = around(window, criterion.at)
    name = next((root(c.args[0]) for s in inside[-1:] for c in ast.walk(s) if isinstance(c, ast.Call) and c.args and call_name(c) not in ("backward", "step")), None)
    made = origin(window, criterion.at, name) if name else None
    return Location(criterion.at.file, made.lineno) if made is not None else criterion.at
