from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import CUTS, VIEWS, Op, Trace
from osler.core.window import Window
from osler.rules.code_questions import grad_switch, nodes, quoted, spot
from osler.rules.graph_questions import (
    Pass,
    count,
    cut_in,
    escape_in,
    ever_optimized,
    numel,
    parameters,
    passes,
    reached,
    shown,
    starved,
)

FLAT = frozenset(("sign", "round", "floor", "ceil", "trunc", "heaviside", "frac", "floor_divide", "sgn", "fix"))
NO_GRAPH = ("does not require grad and does not have a grad_fn", "Can't call numpy() on Tensor that requires grad")


@rule("graph-broken", "wiring")
def check(window: Window, *, least_steps: int = 3) -> Iterator[Finding]:
    """detach, .item(), numpy, no_grad or an operation without derivative cuts the gradient.

    What it is: values of a layer reach the loss, its gradient does not come back.
    How it is seen: optimized parameters that never got a gradient (or only exact zeros) in at least `least_steps` steps; in the recorded
    program their values are followed to the loss, and the operation nearest to the loss whose input carries a gradient and whose
    output does not is named. A loss that is a leaf of its own is certain without that; so is a random draw from a layer's prediction that
    layers after it read without gradient.
    Why it matters: the layers behind the cut stay at their random start, without any error.
    What to do: keep tensors on the graph to the loss; detach only what is logged; use a soft form of hard decisions.
    When this is wrong: frozen, loaded and previously trained layers, targets, teachers and parameters averaged by hand are meant to
    get no gradient and are not reported; straight-through estimators pass one on.
    Source: torch.autograd notes; torch issue 1339; huggingface/peft issue 1142 (checkpointing).
    """
    refused = [f for f in window.facts("exception") if any(m in str(f.get("message")) for m in NO_GRAPH)]
    known = parameters(window)
    if refused:
        if not known or any(p.get("requires_grad", True) for p in known.values()):
            yield total(window, str(refused[-1].get("message"))[:120])
        return
    lacking = starved(window)
    backwards, graphs = window.facts("backward"), window.facts("graph")
    alone = bool(backwards) and all(f.get("root_op", "") is None for f in backwards)
    empty = bool(graphs) and not any(f.get("reentrant") or f.get("compiled") or f.get("truncated") for f in graphs) and not reached(window) & (set(known) | ever_optimized(window))
    if (alone or (empty and lacking.settled)) and (lacking.never or (not known and not (reached(window) and not window.facts("optimizer")))):
        yield total(window, "the value backward starts from is a leaf: nothing of the model leads to it" if alone else
                    f"no parameter is on the autograd graph of the loss in any of {len(graphs)} backwards looked at")
        return
    if not lacking.settled or lacking.steps < least_steps:
        return
    meant = {u for u, p in known.items() if p.get("loaded") or p.get("stepped_before")}
    never = lacking.never
    if never and (found := checkpointed(window, never) or cut(window, never, meant)):
        yield found
        return
    if found := cut_sample(window):
        yield found
        return
    if lacking.zero and (found := flat(window, lacking.zero)):
        yield found


def names(window: Window, uids: set[int]) -> str:
    known = parameters(window)
    return shown([known[u]["name"] for u in sorted(uids) if u in known] or [count(len(uids), "parameter")])


def place_of(window: Window, op: Op) -> Location | None:
    return (grad_switch(window, op.at) if not op.grad else None) or op.at


def cut(window: Window, never: set[int], meant: set[int]) -> Finding | None:
    for run in passes(window):
        op = cut_in(run, never)
        behind = {u for u in never if any(o.index in run.needed for o in run.uses({u}))}
        if op is None:
            op = escape_in(run, never) if not any(o.index in run.needed for o in run.uses(never)) else None
            behind = {u for u in never if run.uses({u})}
        if op is None or not behind:
            continue
        how = "runs with gradients switched off" if not op.grad else f"ends their gradient ({op.name})"
        severity = "note" if behind <= meant else "harmful"
        place = place_of(window, op)
        return Finding(
            "graph-broken", "certain", severity, f"{names(window, behind)} never get a gradient: {quoted(window, op.at, op.name)} {how}",
            f"Keep the graph at {quoted(window, place, op.name)}: " + advice(op) + ".", Where.at(place, also=(str(op.at),) if place != op.at else ()), first_step=0,
            evidence=(Evidence(f"{count(len(behind), 'parameter')} ({names(window, behind)}) got no gradient in any step; their values reach the loss through {op.name}",
                               "gradients/never", value=float(len(behind)), threshold=0.0, samples=starved(window).steps),),
            explains=("unused-module", "loss-plateau", "lr-too-low", "vanishing-gradients"))
    return None


RANDOM = frozenset(("randn_like", "randn", "normal", "normal_", "rand_like", "rand", "standard_normal"))
MIXING = frozenset(("add", "sub", "mul", "addcmul", "add_", "mul_", "exp"))


def cut_sample(window: Window) -> Finding | None:
    """A latent variable drawn from what an encoder predicts loses its gradient before a decoder reads it; the encoder still learns from
    another term (the divergence from the prior), so no parameter is without gradient."""
    for run in passes(window):
        trace, tensors = run.trace, run.trace.tensors
        alive = carriers(run)
        for op in run.operations:
            drawn = op.name == "normal" and not op.grad
            if not op.outs or tensors[op.outs[0]].requires_grad or not (drawn or (op.name in ("detach", "detach_", "data") and not any(t in alive for t in op.ins))):
                continue
            before, noise = upstream(trace, op)
            if not noise or not any(t in alive and tensors[t].requires_grad for t in before):
                continue
            sample = {op.outs[0]}
            read = scored = False
            for later in trace.ops[op.index + 1: run.backward.index]:
                if not any(t in sample for t in later.ins):
                    continue
                read = read or (later.index in run.needed and any(tensors[t].uid >= 0 and tensors[t].requires_grad for t in later.ins))
                scored = scored or any(t not in sample and tensors[t].requires_grad and tensors[t].uid < 0 for t in later.ins)
                if later.outs and not tensors[later.outs[0]].requires_grad:
                    sample.update(later.outs)
            if read and not scored:
                place = place_of(window, op)
                return Finding(
                    "graph-broken", "certain", "harmful", f"a value drawn from the model's own prediction is read without gradient: {quoted(window, op.at, op.name)} ends it",
                    f"Keep the graph at {quoted(window, place, op.name)}: " + ("use rsample() in place of sample()" if drawn else "drop the detach") + ", so that the loss behind it trains what predicts.",
                    Where.at(place, also=(str(op.at),) if place != op.at else ()), first_step=0,
                    evidence=(Evidence(f"{op.name} takes a tensor that requires grad, made with random noise; layers that learn read its result, which does not", "trace", samples=1),),
                    explains=("loss-plateau", "unused-module"))
    return None


def upstream(trace: Trace, op: Op, depth: int = 5) -> tuple[set[int], bool]:
    """The tensors a few elementwise steps before, and whether random numbers are among what was mixed."""
    todo, found, noise = [(t, op.index, 0) for t in op.ins], set(op.ins), op.name == "normal"
    while todo:
        tid, before, far = todo.pop()
        made = trace.producer(tid, before)
        if made is None or far > depth:
            continue
        noise = noise or made.name in RANDOM
        if made.name in MIXING | VIEWS:
            found.update(made.ins)
            todo += [(t, made.index, far + 1) for t in made.ins]
    return found, noise


def carriers(run: Pass) -> set[int]:
    """Tensors that get a gradient from this backward, as far as the recorded program tells."""
    tensors = run.trace.tensors
    alive = {run.loss} if run.loss is not None else set()
    for op in reversed(run.trace.ops[run.start: run.backward.index]):
        if op.index in run.needed and op.name not in CUTS and any(t in alive for t in op.outs):
            alive.update(t for t in op.ins if tensors[t].requires_grad)
    return {t for t in alive if t is not None}


def advice(op: Op) -> str:
    if not op.grad:
        return "do not compute what must learn under no_grad"
    if op.name in ("detach", "detach_", "data"):
        return "drop the detach, or detach a copy for logging only"
    if op.name in ("numpy", "item", "tolist", "__float__", "__int__", "__array__"):
        return "compute with torch operations instead of Python or NumPy values"
    return f"{op.name} has no derivative, use a soft form (probabilities instead of decisions)"


def total(window: Window, why: str) -> Finding:
    """Nothing leads from the loss to any parameter."""
    backward = next((f.at for f in window.facts("backward") + window.facts("exception") if f.at is not None), None)
    everything = set(parameters(window)) | {t.uid for trace in window.traces for t in trace.tensors if t.uid >= 0}
    op = next((found for run in passes(window) if (found := cut_in(run, everything) or escape_in(run, everything)) is not None), None)
    op = op or last_cut(window, everything)
    place = place_of(window, op) if op is not None else rewrapped(window) or backward
    return Finding(
        "graph-broken", "certain", "fatal", "the loss is cut off from every parameter" + (f" by {op.name}" if op is not None else ""),
        f"Keep the graph from the model to the loss: change {quoted(window, place, 'the line that makes the loss')}" + (f"; {advice(op)}" if op is not None else "") + ".",
        Where.at(place, also=(str(backward),) if backward is not None and backward != place else ()), first_step=0,
        evidence=(Evidence(why, "backward"),), explains=("loss-plateau", "lr-too-low", "unused-module", "script-failed"))


def last_cut(window: Window, everything: set[int]) -> Op | None:
    """Without a recorded backward: the last cut behind any parameter in the newest trace."""
    for trace in reversed(window.traces):
        if trace.ops:
            run = Pass(trace, trace.ops[-1], 0, None, frozenset())
            found = escape_in(run, everything) or next((op for op in reversed(trace.ops) if op.name in FLAT | {"argmax", "gt", "lt", "ge", "le", "eq"}), None)
            if found is not None:
                return found
    return None


def rewrapped(window: Window) -> Location | None:
    """A tensor constructed with requires_grad=True, or requires_grad_() called, in the user's source."""
    import ast
    found = nodes(window, lambda n: isinstance(n, ast.Call) and any(k.arg == "requires_grad" and getattr(k.value, "value", None) is True for k in n.keywords))
    return found[-1][0] if found else None


def checkpointed(window: Window, never: set[int]) -> Finding | None:
    for fact in reversed(window.facts("checkpoint-call")):
        if fact.get("use_reentrant") and not fact.get("inputs_require_grad"):
            return Finding(
                "graph-broken", "certain", "harmful", "reentrant checkpointing of inputs without gradient: the layers inside never get one",
                f"Pass use_reentrant=False at {quoted(window, fact.at, 'the checkpoint call')} (or let its input require a gradient).", Where.at(fact.at), first_step=fact.get("first_step", fact.step),
                evidence=(Evidence(f"{fact.get('calls')} reentrant checkpoint calls whose inputs do not require grad; {count(len(never), 'parameter')} ({names(window, never)}) "
                                   "never got a gradient", "checkpoint-call", value=float(len(never)), threshold=0.0, samples=int(fact.get("calls") or 1)),),
                explains=("unused-module", "frozen-params", "loss-plateau"))
    return None


def flat(window: Window, zero: set[int]) -> Finding | None:
    """All gradients exactly zero behind an operation whose derivative is zero everywhere."""
    for run in passes(window):
        start = {t for op in run.uses(zero) for t in op.outs}
        after = run.trace.forward(start)
        found = [op for op in run.operations if op.name.rstrip("_") in FLAT and op.index in after and op.outs and run.trace.tensors[op.outs[0]].requires_grad
                 and numel(run.trace.tensors[op.outs[0]].shape) > 0]
        if found:
            op = found[-1]
            return Finding(
                "graph-broken", "certain", "fatal" if len(zero) == len(parameters(window)) else "harmful", f"{op.name} has derivative 0: {names(window, zero)} get gradients of exactly zero",
                f"Replace {quoted(window, op.at, op.name)} by a smooth form, or pass the gradient straight through: x + (q(x) - x).detach().", Where.at(op.at), first_step=op.step,
                evidence=(Evidence(f"the gradients of {count(len(zero), 'parameter')} were exactly 0 in all steps looked at; {op.name} lies between them and the loss", "gradients/always_zero",
                                   value=float(len(zero)), threshold=0.0, samples=starved(window).steps),), explains=("loss-plateau", "lr-too-low", "vanishing-gradients", "dead-units"))
    graphs = [f for f in window.facts("graph") if f.get("zero_gradient_ops")]
    if graphs and any(zero & set(f.get("reached") or ()) for f in graphs):
        first = graphs[-1]["zero_gradient_ops"][0]
        place = spot(first.get("at"))
        return Finding("graph-broken", "certain", "harmful", f"{first.get('op')} has derivative 0 and lies between {names(window, zero)} and the loss",
                       f"Replace {quoted(window, place, 'the operation')} by a smooth form.", Where.at(place), first_step=0,
                       evidence=(Evidence(f"the gradients of {count(len(zero), 'parameter')} were exactly 0 in all steps looked at", "gradients/always_zero", value=float(len(zero)),
                                          threshold=0.0, samples=starved(window).steps),), explains=("loss-plateau", "vanishing-gradients"))
    return None
