from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.growth_questions import Container, bounded_each_step, containers, resident, sites, wasted
from osler.rules.script import FUNCTIONS, around, evaluation_block, function_around, training_functions, trains
from osler.rules.stack_questions import innermost
from osler.rules.wiring.hidden_state_not_detached import SECOND_TIME, growing, readers

SUMS = frozenset(("add", "add_", "sub", "sub_", "mul", "mul_", "div", "lerp", "lerp_", "cat", "stack", "maximum", "minimum", "max", "min", "hstack", "vstack", "concat"))


@rule("loss-graph-retained", "memory")
def check(window: Window, *, looks: int = 2, nodes: float = 2.0) -> Iterator[Finding]:
    """Tensors with their graph are kept across steps.

    **What it is.** A running sum, a list or a buffer takes the loss (or outputs) itself instead of its value: `total += loss`,
    `losses.append(loss)`. Whatever is kept keeps the graph that made it.

    **How it is seen.** In the recorded steps an operation adds to a tensor that an earlier step computed and that still requires grad; or a container whose newest
    element carries a graph was longer at `looks` further looks; or the graph that a variable carries grew to `nodes` times its size.

    **Why it matters.** Memory grows with every step, and what hangs on the graph (activations not yet freed, batches, hidden states)
    stays too; with retain_graph=True each backward walks all of it.

    **What to do.** Keep `loss.item()` or `loss.detach()`.

    **When this is wrong.** Losses that are collected in order to be summed and differentiated within one step are let go with it; containers that are emptied in
    every step (log-probabilities of an episode) are recognised by their text.

    **Source.** PyTorch FAQ, "Don't accumulate history across your training loop"; pytorch issue 64586.
    """
    told: set[tuple[str, int]] = set()
    for found in [*sums(window), *collected(window, looks), *growing_graphs(window, nodes)]:
        key = (found.where.file or "", (found.where.line or 0) // 4)
        if key not in told and not told:
            told.add(key)
            yield found


def sums(window: Window) -> Iterator[Finding]:
    """`total += loss` in a recorded step."""
    for trace in window.traces:
        for op in readers(trace):
            if op.name not in SUMS or not op.outs or (any(len(trace.tensors[o].shape) and trace.tensors[o].shape != (1,) for o in op.outs) and op.name not in ("cat", "stack")):
                continue
            at = accumulates(window, op)
            if at is None:
                continue
            ended = next((f for f in window.facts("exception") if SECOND_TIME in str(f.get("message"))), None)
            severity = "fatal" if ended is not None else "harmful" if growing(window, 3.0) is not None else wasted(window)
            yield told(window, at, f"`{op.name}` takes a tensor of the step before, which still carries its graph, and its result carries both",
                       "trace", op.at, severity)
            return


def accumulates(window: Window, op: Op) -> Location | None:
    """The line that keeps the sum; where the sum is a method's (a meter), the line that hands it the tensor."""
    if op.at is None:
        return None
    statement = innermost(window, op.at)
    if statement is None:
        return op.at
    if not isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return None
    function = function_around(around(window, op.at))
    target = statement.target if isinstance(statement, ast.AugAssign | ast.AnnAssign) else statement.targets[0]
    if isinstance(target, ast.Attribute) and function is not None and op.up and function.name not in training_functions(window, op.at.file):
        parameters = {a.arg for a in function.args.args[1:]}
        used = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
        if used & parameters:
            return op.up[0]
    return op.at


def told(window: Window, at: Location, evidence: str, signal: str, other: Location | None = None, severity: str | None = None, value: float | None = None) -> Finding:
    grown = resident(window)
    return Finding(
        "loss-graph-retained", "certain", severity or wasted(window), "A tensor is kept across steps together with its autograd graph",
        f"Keep its value only, .item() or .detach(): {quoted(window, at, 'this line')}.",
        Where.at(at, also=(str(other),) if other is not None and other.line != at.line else ()), first_step=1,
        evidence=(Evidence(evidence, signal, value), *((Evidence(f"resident memory was {grown[0]:.0f} MB at the start and {grown[1]:.0f} MB at the end", "growth", grown[1]),)
                                                       if grown else ())),
        treatment="detach-state", explains=("python-memory-leak", "hidden-state-not-detached", "script-failed"))


def collected(window: Window, looks: int) -> Iterator[Finding]:
    """Containers of tensors that carry graphs."""
    for c in sorted((c for c in containers(window) if c.grad and c.type not in ("graph",)), key=lambda c: -c.rate):
        if c.often < looks or bounded_each_step(window, c.variable):
            continue
        found = sites(window, c.variable)
        inside = [s for s in found if not within_step(window, s.at, c)]
        if not found or not inside:
            continue
        at = inside[0].at
        seldom = c.rate < 0.2
        yield told(window, at, f"{c.name} grew from {c.lens[0]} to {c.lens[-1]} entries by step {c.steps[-1]}; the newest one ({c.element}) carries a graph", "growth",
                   severity="note" if seldom and c.lens[-1] < 50 else wasted(window), value=float(c.lens[-1]))


def within_step(window: Window, at: Location, c: Container) -> bool:
    """The container is a local of a function that lives for one step."""
    function = function_around(around(window, at))
    return bool(function is not None and c.where is not None and c.where.function == function.name and function.name == "forward")


def growing_graphs(window: Window, factor: float) -> Iterator[Finding]:
    """Variables whose graph grew from look to look."""
    for c in containers(window):
        pairs = sorted(dict(zip(c.steps, c.lens, strict=True)).items())
        lens = [n for _, n in pairs]
        if c.type != "graph" or c.element != "scalar" or len(lens) < 4 or lens[-1] < factor * lens[0] or any(b < a for a, b in pairwise(lens)) or lens[-1] - lens[0] < 12:
            continue
        found = sites(window, c.variable)
        if not found or evaluated(window, found[0].at) or bounded_each_step(window, c.variable):
            continue
        yield told(window, found[0].at, f"the graph that {c.name} carries grew from {lens[0]} to {lens[-1]} nodes by step {c.steps[-1]}", "growth", value=float(lens[-1]))


def evaluated(window: Window, at: Location) -> bool:
    block = evaluation_block(window, at)
    return isinstance(block, FUNCTIONS) and not trains(block, training_functions(window, at.file))
