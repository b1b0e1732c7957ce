from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import grad_switch, quoted
from osler.rules.curve import modules
from osler.rules.evaluation.eval_mode_missing import judging_blocks
from osler.rules.graph_questions import TEACHER, copies, criteria
from osler.rules.growth_questions import resident, wasted
from osler.rules.loaders import SAYS_VALIDATION
from osler.rules.script import (
    FUNCTIONS,
    LOOPS,
    around,
    below_function,
    call_name,
    calls,
    evaluation_block,
    function_around,
    no_grad,
    parse,
    place,
    targets,
    training_functions,
    trains,
    words,
)
from osler.rules.stack_questions import step_line, times

NEEDS_GRAD = frozenset(("backward", "grad", "jacobian", "hessian", "vjp", "jvp", "functional_call", "requires_grad_", "enable_grad", "hvp", "vhp", "jacrev", "hessian_vector_product"))


@rule("no-grad-missing", "memory")
def check(window: Window) -> Iterator[Finding]:
    """Validation builds autograd graphs.

    **What it is.** A forward pass whose result is never differentiated (validation, inference, a teacher's or target network's answer)
    runs with gradients on.

    **How it is seen.** Between steps, trained modules ran in evaluation mode with gradient mode on; or the code of an evaluation ran
    (losses that no backward used, batches of a validation loader, looks at the running stack) and neither it nor its callers switch gradients off. A
    teacher: the graph of the training loss reaches parameters of a copy that no optimizer holds, through inputs that need no gradient.

    **Why it matters.** Every activation is kept until the result is dropped: an evaluation that adds up losses or collects outputs holds the graphs of
    the whole validation set, which is where many runs end out of memory. It also costs time.

    **What to do.** Put the evaluation under `torch.no_grad()` or `torch.inference_mode()`, likewise the teacher's forward.

    **When this is wrong.** Evaluations that need gradients (adversarial examples, saliency, influence, inner loops of meta-learning, penalties) take
    them: code that calls backward, autograd.grad or their like is left alone.

    **Source.** hszhao/semseg issue 60; PyTorch FAQ, "My model reports cuda runtime error(2): out of memory".
    """
    told = times(window)
    found: set[tuple[str, int]] = set()
    for at, forwards, evidence in [*phases(window), *blocks(window), *single_lines(window)]:
        block = evaluation_block(window, at)
        head = line_of(window, at)
        if (head.file, block.lineno if block is not None else head.line) in found or off(window, at) or needs_grad(window, at):
            continue
        found.add((head.file, block.lineno if block is not None else head.line))
        seconds = sum(r.seconds for r in told.rows if block is not None and any(inside(block, at.file, f) for f in r.stack)) if told is not None else 0.0
        part = told.share(seconds) if told is not None else 0.0
        grown = resident(window)
        small = forwards <= 1 and part < 0.05
        yield Finding(
            "no-grad-missing", "certain", "note" if small else wasted(window), "An evaluation builds autograd graphs that nobody uses",
            f"Put it under torch.no_grad() (or inference_mode): {quoted(window, head, 'this evaluation')}.",
            Where.at(head, also=(str(at),) if at.line != head.line else ()),
            evidence=(evidence, *((Evidence(f"{part:.0%} of the time was spent in it", "time", part),) if part >= 0.01 else ()),
                      *((Evidence(f"resident memory was {grown[0]:.0f} MB at the start and {grown[1]:.0f} MB at the end", "growth", grown[1]),) if grown else ())),
            treatment="no-grad", explains=("loss-graph-retained", "python-memory-leak", "out-of-memory", "process-killed"))
    if not found:
        yield from teachers(window)


def inside(block: ast.stmt, file: str, frame: Location) -> bool:
    return frame.file == file and block.lineno <= frame.line <= (block.end_lineno or block.lineno)


def phases(window: Window) -> Iterator[tuple[Location, int, Evidence]]:
    """Stretches between steps in which trained modules ran in evaluation mode with gradients on."""
    for phase in window.facts("phase"):
        if not phase.get("first_step", phase.step) or phase.get("kind") == "interleaved":
            continue
        for row in phase.get("roots") or ():
            at = place(row.get("at")) or phase.at
            n = int(row.get("forwards") or 0)
            if row.get("grad") and not row.get("training") and at is not None and not (n <= 1 and step_line(window, (at,)) is not None):
                yield at, n, Evidence(f"{n} forward pass{'es' * (n != 1)} in evaluation mode with gradients on, first at {at}", "phase", float(n), 0.0, n)


def blocks(window: Window) -> Iterator[tuple[Location, int, Evidence]]:
    """Evaluations told by their text that ran: losses without a backward, or looks at the stack that fell into them."""
    counts = window.last("cycle")
    unused = int(counts.get("losses_without_backward") or 0) if counts is not None else 0
    told = times(window, 1)
    for file, block in judging_blocks(window):
        rows = [r for r in told.rows if any(inside(block, file, f) for f in r.stack)] if told is not None else []
        model = next((c for c in calls(block) if model_call(window, c)), None)
        quiet = any(no_grad(n) for n in ast.walk(block) if isinstance(n, ast.stmt)) or next(calls(block, "set_grad_enabled"), None) is not None
        if model is None or quiet or not (unused or rows):
            continue
        why = f"{unused} losses were computed that no backward used" if unused else f"the running stack was seen in it {sum(r.samples for r in rows)} times"
        yield Location(file, model.lineno), max(unused, 2 if isinstance(block, LOOPS) or any(isinstance(n, LOOPS) for n in ast.walk(block)) else 1), Evidence(
            why + ", and nothing there switches gradients off", "cycle", float(unused))


def single_lines(window: Window) -> Iterator[tuple[Location, int, Evidence]]:
    """A criterion that is called with gradients on a line that speaks of validation, in a statement that trains nothing."""
    counts = window.last("cycle")
    unused = int(counts.get("losses_without_backward") or 0) if counts is not None else 0
    for fact in criteria(window) if unused else ():
        statements = around(window, fact.at)
        if fact.at is None or not statements or not fact.get("first_step"):
            continue
        last = statements[-1]
        named = {w for t in targets(last) for w in [t.split(".")[-1]]} if isinstance(last, ast.Assign) else set()
        if not any(SAYS_VALIDATION.search(w) for w in named) or trains(last) or differentiated(window, fact.at, named):
            continue
        n = int(fact.get("calls") or 1)
        yield fact.at, 1, Evidence(f"{n} calls of {fact.get('function')} there built a graph, {unused} losses were computed that no backward used", "criterion", float(n))


def differentiated(window: Window, at: Location, names: set[str]) -> bool:
    """Some line calls backward on one of these names, or takes it into another value that may be trained on."""
    module = parse(window.sources.get(at.file, ""))
    return any(call_name(c) in NEEDS_GRAD and names & words(c) for c in calls(module))


def model_call(window: Window, call: ast.Call) -> bool:
    """A call of something named like a model."""
    name = call_name(call)
    return bool(re.search(r"(^|_)(model|net|network|module|encoder|decoder|classifier|predictor|policy|critic|actor|generator|forward|predict|mlp|cnn|lstm|gru|rnn|transformer|backbone|head)(_|$|\d)", name, re.I)
                or (name and name in {str(m.get("class", "")).lower() for m in modules(window).values()}))


def line_of(window: Window, at: Location) -> Location:
    """Where ``with torch.no_grad():`` belongs: the widest loop of the evaluating function around the forward pass, or the line itself."""
    statements = around(window, at)
    inner = below_function(statements)
    training = training_functions(window, at.file)
    loop = next((s for s in inner if isinstance(s, LOOPS) and not trains(s, training)), None)
    return Location(at.file, loop.lineno if loop is not None else at.line, at.function)


def off(window: Window, at: Location) -> bool:
    """A switch stands around the line, or around a call of its function."""
    if grad_switch(window, at) is not None:
        return True
    function = function_around(around(window, at))
    module = parse(window.sources.get(at.file, ""))
    sites = [c for c in calls(module) if function is not None and call_name(c) == function.name]
    return bool(sites) and all(grad_switch(window, Location(at.file, c.lineno)) is not None for c in sites)


def needs_grad(window: Window, at: Location) -> bool:
    block = evaluation_block(window, at)
    statements = around(window, at)
    function = function_around(statements)
    scope: list[ast.AST] = [s for s in (block,) if s is not None]
    if function is not None and function.name not in training_functions(window, at.file):
        scope.append(function)
    return any(call_name(c) in NEEDS_GRAD for node in scope for c in calls(node))


def teachers(window: Window) -> Iterator[Finding]:
    """Copies of a trained model, or models named after a teacher, that the loss reaches though no optimizer holds them."""
    known = {int(p["uid"]): p for f in window.facts("params") for p in f.get("params") or () if isinstance(p.get("uid"), int)}
    reached = {u for f in window.facts("graph") for u in f.get("reached_unoptimized") or ()}
    every = modules(window)
    shadows = copies(window)
    for root in {m.get("root") for m in every.values()}:
        own = [p for p in known.values() if every.get(p.get("module"), {}).get("root") == root]
        hit = [p for p in own if p["uid"] in reached]
        if not hit or any(p.get("optimizer") is not None for p in own):
            continue
        at = teacher_call(window, {i for i, m in every.items() if m.get("root") == root}, {int(p["uid"]) for p in own}, root in shadows)
        if at is None or off(window, at):
            continue
        n = len(hit)
        yield Finding(
            "no-grad-missing", "certain", "wasteful", f"The loss builds a graph through a model that is not trained: {n} parameters get gradients nobody uses",
            f"Compute its answer under torch.no_grad(): {quoted(window, at, 'this forward pass')}.", Where.at(at),
            evidence=(Evidence(f"the backward pass reaches {n} parameters of a copy that no optimizer holds, through inputs that need no gradient", "graph", float(n)),),
            treatment="no-grad", explains=("optimizer-wrong-params", "grad-not-cleared", "unused-module", "frozen-params"))


def teacher_call(window: Window, ids: set[int], own: set[int], shadow: bool) -> Location | None:
    """The line that runs the model, if its inputs need no gradient and it is a copy or named after a teacher."""
    for trace in window.traces:
        ops = [op for op in trace.ops if op.module in ids and op.grad and not op.name.startswith("@")]
        if not ops:
            continue
        made = {t for op in ops for t in op.outs}
        given = {t for op in ops for t in op.ins} - made
        if any(trace.tensors[t].requires_grad and trace.tensors[t].uid not in own for t in given):
            return None
        function = {s.name for f in window.sources for s in ast.walk(parse(window.sources[f]) or ast.Module([], [])) if isinstance(s, FUNCTIONS) and s.name == "forward"}
        at = next((f for f in ops[0].lines if f.function not in function and f.function != "forward"), None)
        if at is None:
            continue
        named = any(TEACHER.search(part) for part in re.findall(r"\w+", window.line(at.file, at.line)))
        return at if shadow or named else None
    return None
