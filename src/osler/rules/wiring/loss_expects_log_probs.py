from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import VIEWS, Op
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.graph_questions import Pass, change_line, criteria, criterion_op, module_name, modules, origin, passes

LOSSES = ("nll_loss", "kl_div", "ctc_loss")
LOGS = frozenset(("log_softmax", "log", "logsigmoid", "log1p", "log2", "logsumexp", "log_prob", "logaddexp"))


@rule("loss-expects-log-probs", "wiring")
def check(window: Window, *, share: float = 0.01) -> Iterator[Finding]:
    """A loss that needs log-probabilities gets scores or probabilities.

    What it is: nll_loss, kl_div or ctc_loss (or a hand-written negative mean of picked entries) is fed by a layer's scores or by a
    softmax, not by a log-softmax.
    How it is seen: logsumexp of the input rows is 0 in at most `share` of the calls looked at, and no logarithm made the input; for
    kl_div also a target that holds log-probabilities without `log_target`.
    Why it matters: nll_loss of raw scores has no minimum: it runs to minus infinity without learning the classes. Of probabilities it
    has nearly no gradient.
    What to do: log_softmax before the loss, or cross_entropy on the raw scores.
    When this is wrong: log-probabilities that are scaled or masked afterwards keep their logarithm in the graph and are not reported.
    Source: torch.nn.NLLLoss, KLDivLoss, CTCLoss documentation.
    """
    for fact in criteria(window):
        if fact.get("function") not in LOSSES or not isinstance(fact.get("log_probs"), int | float):
            continue
        if float(fact["log_probs"]) <= share and not logged(fact):
            yield told(window, fact)
            return
        if fact.get("function") == "kl_div" and not fact.get("log_target") and float(fact.get("target_max") or 0.0) <= 0.0 and float(fact.get("target_min") or 0.0) < 0.0:
            yield log_target(window, fact)
            return
    yield from picked(window)


def logged(fact: Fact) -> bool:
    names = [str(fact.get("input_op")), *(str(n) for n in fact.get("input_chain") or ())][:4]
    return fact.get("input_op") is None or any(n.startswith(("Log", "Logsumexp")) for n in names)


def told(window: Window, fact: Fact) -> Finding:
    function, calls = str(fact.get("function")), int(fact.get("sampled") or 1)
    probabilities = float(fact.get("rows_sum_one") or 0.0) > 0.9
    got = "probabilities" if probabilities else "raw scores"
    place, module = producer(window, fact)
    also = tuple(str(p) for p in (fact.at, spot(fact.get("built_at"))) if p is not None and p != place)
    figures: list[Any] = [fact.get("input_min"), fact.get("input_max")]
    limits = f", inside [{figures[0]:.3g}, {figures[1]:.3g}]" if all(isinstance(v, int | float) for v in figures) else ""
    cure = "torch.log_softmax(..., dim=1) in place of softmax" if probabilities else "torch.log_softmax(..., dim=1)"
    return Finding(
        "loss-expects-log-probs", "certain", "harmful", f"{function} needs log-probabilities and gets {got}",
        f"Apply {cure} at {quoted(window, place, 'the output layer')}" + (", or use cross_entropy on the raw scores." if function == "nll_loss" else "."),
        Where.at(place, module=module, also=also), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"exp of the input rows sums to 1 in {float(fact['log_probs']):.0%} of {calls} calls; the input was made by {fact.get('input_op')}{limits}",
                           "criterion/input", value=float(fact["log_probs"]), threshold=1.0, samples=calls),),
        treatment="log-probs", explains=("loss-sign", "loss-diverged", "loss-plateau"))


def producer(window: Window, fact: Fact) -> tuple[Location | None, str | None]:
    """The user line that made the loss's input; for a model of library layers only, where its last layer was built."""
    known = modules(window)
    call = criterion_op(window, fact)
    if call is not None:
        trace, op = call
        source, _ = origin(trace, op.ins[0], op.index)
        if source is not None and source.at is not None:
            return change_line(known, source, ("Softmax", "Sigmoid")), module_name(known, source.module)
    return fact.at, None


def log_target(window: Window, fact: Fact) -> Finding:
    return Finding(
        "loss-expects-log-probs", "certain", "harmful", "kl_div gets log-probabilities as its target without log_target=True",
        f"Pass log_target=True at {quoted(window, fact.at, 'the call')}, or give the target as probabilities.", Where.at(fact.at), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"all target values are at most 0 (smallest {fact.get('target_min')})", "criterion/target", value=fact.get("target_max"),
                           threshold=0.0, samples=int(fact.get("sampled") or 1)),), treatment="log-probs")


def picked(window: Window) -> Iterator[Finding]:
    """The hand-written form: minus the mean of the entries picked by the labels, straight from a layer's scores."""
    known = modules(window)
    for run in passes(window):
        found = pick(run)
        if found is None:
            continue
        pick_op, source = found
        place = change_line(known, source)
        yield Finding(
            "loss-expects-log-probs", "certain", "harmful", f"the loss is minus the mean of entries picked from {source.name}'s output, which are no log-probabilities",
            f"Pick from log_softmax of {quoted(window, source.at, 'the scores')}, or use cross_entropy.",
            Where.at(pick_op.at or place, module=module_name(known, source.module), also=(str(place),) if place else ()), first_step=pick_op.step,
            evidence=(Evidence(f"between {source.name} and the loss there are only a choice by label ({pick_op.name}), a mean and a sign; no logarithm", "trace"),),
            treatment="log-probs", explains=("loss-sign", "loss-diverged"))
        return


def pick(run: Pass) -> tuple[Op, Op] | None:
    negative, tid, before = False, run.loss, run.backward.index
    while tid is not None:
        op = run.trace.producer(tid, before)
        if op is None or not op.ins:
            return None
        integers = [t for t in op.ins[1:] if "int" in run.trace.tensors[t].dtype]
        if op.name in ("gather", "getitem", "take_along_dim") and integers and negative:
            source, _ = origin(run.trace, op.ins[0], op.index)
            made = {"linear", "conv1d", "conv2d", "softmax", "addmm", "matmul"}
            return (op, source) if source is not None and source.name in made and run.trace.tensors[op.ins[0]].requires_grad else None
        if op.name not in VIEWS | {"neg", "mean", "sum"}:
            return None
        negative ^= op.name == "neg"
        tid, before = op.ins[0], op.index
    return None
