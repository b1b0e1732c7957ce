from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op, Trace
from osler.core.window import Window
from osler.rules.code_questions import enclosing, quoted, spot

RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))
SECOND_TIME = "backward through the graph a second time"
OVERWRITTEN = "modified by an inplace operation"


@rule("hidden-state-not-detached", "wiring")
def check(window: Window, *, growth: float = 3.0) -> Iterator[Finding]:
    """Recurrent state keeps the graph across batches.

    What it is: the state that one batch hands to the next still carries its autograd graph.
    How it is seen: in the recorded program, an operation reads a tensor that an earlier step computed and that still requires grad;
    torch refuses the second backward (with retain_graph=True because the step has changed weights it needs), or, with retain_graph=True, the graph grows by the same amount in every step (at least
    `growth` times its first size).
    Why it matters: an exception at the second step, or ever slower steps and growing memory.
    What to do: detach the state between batches (truncated backpropagation through time).
    When this is wrong: a sequence that is unrolled on purpose over several batches before one backward reads no state of an earlier
    backward.
    Source: torch issue 2769; the word-language-model example's repackage_hidden.
    """
    grown = growing(window, growth)
    for fact in window.facts("exception"):
        message = str(fact.get("message"))
        retained = OVERWRITTEN in message and fact.step > 0 and any(f.get("retain_graph") for f in window.facts("backward"))
        if SECOND_TIME not in message and not retained:
            continue
        backward = fact.at or next((p for p in map(spot, fact.get("frames") or ()) if p is not None), None)
        carried = stale_reader(window, backward)
        place = (entry(carried, backward) if carried is not None else None) or loop_variable(window, backward) or backward
        if carried is None and place == backward:
            continue
        if retained and (carried is None or carried.name not in RECURRENT) and loop_variable(window, backward) is None:
            continue
        yield told(window, place, backward, "fatal", "the backward of the second step runs into the graph of the first: state is carried over without detach",
                   Evidence(f"{fact.get('type')}: {message[:120] if retained else 'Trying to ' + SECOND_TIME}", "exception"), carried)
        return
    if grown is not None:
        steps, nodes, backward = grown
        carried = stale_reader(window, backward)
        if carried is None:
            return
        yield told(window, entry(carried, backward) or carried.at, backward, "harmful", "the graph grows with every step: state is carried over without detach",
                   Evidence(f"a backward walks {nodes[-1]} graph nodes at step {steps[-1]}, {nodes[0]} at step {steps[0]}", "graph-growth", value=float(nodes[-1]),
                            threshold=growth * nodes[0], samples=len(nodes)), carried)


def told(window: Window, place: Location | None, backward: Location | None, severity: str, title: str, evidence: Evidence, op: Op | None) -> Finding:
    more = (Evidence(f"{op.name} reads a tensor that an earlier step computed and that still carries its graph", "trace"),) if op is not None else ()
    return Finding(
        "hidden-state-not-detached", "certain", severity, title,
        f"Detach the state before {quoted(window, place, 'the call that takes it')}: state = state.detach() (for an LSTM, each of its two tensors).",
        Where.at(place, also=(str(backward),) if backward is not None and backward != place else ()), first_step=1, evidence=(evidence, *more), treatment="detach-state",
        explains=("loss-graph-retained", "inplace-mutation", "script-failed", "out-of-memory"))


def stale_reader(window: Window, backward: Location | None) -> Op | None:
    """The first operation that reads a tensor computed before an earlier backward and still on its graph; recurrent ones first."""
    found: list[Op] = []
    for trace in window.traces:
        found += [op for op in readers(trace) if not running_sum(trace, op)]
    return next((op for op in found if op.name in RECURRENT), found[0] if found else None)


def running_sum(trace: Trace, op: Op) -> bool:
    """A sum of losses, not a state: loss-graph-retained."""
    return op.name in ("add", "add_", "mul", "mul_", "sub", "div") and all(not trace.tensors[t].shape for t in (*op.ins, *op.outs))


def readers(trace: Trace) -> Iterator[Op]:
    made_in: dict[int, int] = {}
    backwards = 0
    for op in trace.ops:
        if op.name.startswith("@"):
            backwards += op.name == "@backward"
            continue
        for t in op.ins:
            tensor = trace.tensors[t]
            early = made_in.get(t, backwards) < backwards and tensor.requires_grad
            if (early or (tensor.stale_graph and backwards)) and tensor.uid < 0 and op.grad and op.name not in ("detach", "item", "detach_", "numpy", "data", "requires_grad_") \
                    and any(trace.tensors[o].requires_grad for o in op.outs):
                yield op
                break
        for t in op.outs:
            made_in[t] = backwards


def entry(op: Op, backward: Location | None) -> Location | None:
    """The line of the training loop from which the operation was reached: its frame in the function of the backward."""
    if backward is not None:
        for frame in reversed(op.lines):
            if frame.file == backward.file and frame.function == backward.function:
                return frame
    return op.lines[-1] if op.lines else None


def loop_variable(window: Window, backward: Location | None) -> Location | None:
    """In the loop around the backward, an assignment that hands a name to a call and gets it back: `out, h = model(x, h)`."""
    for loop in enclosing(window, backward, (ast.For, ast.While)):
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and backward is not None:
                targets = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                given = {n.id for a in node.value.args for n in ast.walk(a) if isinstance(n, ast.Name)}
                if targets & given and isinstance(node.targets[0], ast.Tuple):
                    return Location(backward.file, node.lineno, backward.function)
    return None


def growing(window: Window, growth: float) -> tuple[list[int], list[int], Location | None] | None:
    for fact in reversed(window.facts("graph-growth")):
        steps, nodes = list(fact.get("steps") or ()), list(fact.get("nodes") or ())
        if len(nodes) >= 4 and nodes[0] > 0 and nodes[-1] >= growth * nodes[0] and all(b > a for a, b in pairwise(nodes)):
            return steps, nodes, fact.at or where(window)
    return None


def where(window: Window) -> Location | None:
    return next((f.at for f in window.facts("backward") if f.at is not None), None)
