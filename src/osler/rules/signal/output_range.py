from __future__ import annotations

import math
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.curve import curve
from osler.rules.graph_questions import change_line, criteria, criterion_op, module_name, modules, origin
from osler.rules.scales import CHOOSES, WEIGHTED, Pair, pairs, reach, score

CLASSES = ("Sigmoid", "Hardsigmoid", "Tanh", "Hardtanh", "Softmax", "ReLU", "ReLU6", "Softplus", "ELU", "CELU", "GELU", "SiLU", "Softsign", "LogSigmoid",
           "LogSoftmax", "LSTM", "GRU", "RNN")
RECTIFIED = ("relu", "relu_", "relu6", "softplus", "rnn_relu", "abs", "square")


@rule("output-range", "signal")
def check(window: Window, *, share: float = 0.1, excess: float = 0.25, learned: float = 0.15, floor: float = 0.25, unlearned: float = 0.3) -> Iterator[Finding]:
    """The output activation cannot reach the targets.

    **What it is.** The last operation before the loss is bounded (sigmoid, tanh, softmax, relu, clamp, the hidden state of an LSTM), and the targets lie
    outside of its range; or a relu or tanh squeezes the scores that a softmax or sigmoid loss wants free.

    **How it is seen.** The operation that made the prediction, from the recorded program, gives the range; the targets of all calls looked at give the
    share beyond it. A share of `share` or more counts, if the farthest target lies `excess` of the targets' deviation beyond the bound and the loss did
    not come below `learned` times that of a constant. For scores: the lowest loss that bounded scores allow is more than `floor` of that of a guess,
    or rectified scores still leave `unlearned` of it.

    For a generator: a second model gets its bounded output and data, by turns, at the same weights, and the data lie beyond the bound.

    **Why it matters.** The unit saturates at its bound for these targets, where its gradient is 0; the rest of the loss can never be learned.

    **What to do.** Drop the activation (a linear output), scale the targets into its range, or scale the output: `low + (high - low) * sigmoid(x)`.

    **When this is wrong.** A few noisy targets past the bound (fewer than `share`) do no harm. Outputs that are scaled or shifted after the activation are not
    judged, nor are comparisons inside the model, or with targets that carry a gradient.

    **Source.** Handbook A §3 (the loss and the output space belong together); Karpathy, "A Recipe for Training Neural Networks" (2019).
    """
    told = False
    for pair in pairs(window):
        op = pair.maker()
        bounds = reach(op) if op is not None else None
        if op is None or bounds is None or pair.function in ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "poisson_nll_loss", "kl_div"):
            continue
        low, high = bounds
        beyond = pair.outside(low, high)
        if beyond < share or pair.excess(low, high) < excess * max(pair.target["std"], 1e-12):
            continue
        found = score(window, pair)
        if found is not None and found.ratio < learned:
            continue
        yield unreachable(window, pair, op, low, high, beyond, found.ratio if found is not None else None, share)
        told = True
        break
    if not told:
        yield from squeezed(window, floor, unlearned)
        yield from generated(window, share, excess)


def activation(op: Op) -> str:
    return {"relu_": "relu", "lstm": "the hidden state of the LSTM", "gru": "the hidden state of the GRU", "rnn_tanh": "the hidden state of the RNN"}.get(op.name, op.name)


def interval(low: float, high: float) -> str:
    return f"[{low:g}, {high:g}]" if math.isfinite(low) and math.isfinite(high) else f"{low:g} and above" if math.isfinite(low) else f"{high:g} and below"


def place(window: Window, op: Op) -> tuple[Location | None, str | None]:
    known = modules(window)
    return change_line(known, op, CLASSES), module_name(known, op.module)


def unreachable(window: Window, pair: Pair, op: Op, low: float, high: float, beyond: float, ratio: float | None, share: float) -> Finding:
    at, name = place(window, op)
    word = "targets" if pair.function != "data" else "data"
    seen = f"{word} from {pair.target['min']:.4g} to {pair.target['max']:.4g}"
    more = (Evidence(f"the loss ends at {ratio:.2g} times that of a constant prediction", "calls/value", ratio, None),) if ratio is not None else ()
    return Finding(
        "output-range", "certain", "harmful", f"{activation(op)} gives {interval(low, high)}, but {beyond:.0%} of the {word} lie outside",
        f"Drop the activation at {quoted(window, at, activation(op))} (a linear output), or scale targets or output so that the ranges agree.",
        Where.at(at, module=name, also=(str(pair.at),) if pair.at is not None and pair.at != at else ()), first_step=op.step,
        evidence=(Evidence(f"{activation(op)} makes the prediction that is compared with {seen}; {beyond:.0%} lie beyond {interval(low, high)}",
                           "criterion/target", beyond, share, pair.fact.get("sampled") if pair.fact is not None else None), *more),
        treatment="normalise-targets", explains=("loss-plateau",))


def squeezed(window: Window, floor: float, unlearned: float) -> Iterator[Finding]:
    """Scores for a softmax or sigmoid loss that an activation bounds or rectifies."""
    for fact in criteria(window):
        function = str(fact.get("function"))
        if function not in ("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits"):
            continue
        call = criterion_op(window, fact)
        if call is None:
            continue
        trace, op = call
        made, _ = origin(trace, op.ins[0], op.index, CHOOSES)
        if function == "nll_loss":
            made = origin(trace, made.ins[0], made.index, CHOOSES)[0] if made is not None and made.name == "log_softmax" and made.ins else None
        if made is None:
            continue
        shape = (fact.get("input") or {}).get("shape") or [1, 2]
        binary = function == "binary_cross_entropy_with_logits"
        classes = 2 if binary else int(shape[1]) if len(shape) > 1 else 2
        guess = math.log(classes)
        bounds = reach(made) if made.name not in ("softmax", "sigmoid", "hardsigmoid") else None
        least = lowest(bounds, binary, classes) if bounds is not None else 0.0
        if bounds is not None and least > floor * guess:
            yield bounded(window, fact, made, bounds, least, guess, floor)
            return
        if made.name in RECTIFIED:
            line = curve(window)
            left = line.late / guess if line is not None and line.one_sign else None
            yield rectified(window, fact, made, binary, left, unlearned)
            return


def lowest(bounds: tuple[float, float], binary: bool, classes: int) -> float:
    """The lowest cross entropy that scores within bounds allow."""
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0
    return math.log1p(math.exp(-max(high, -low))) if binary else math.log1p((classes - 1) * math.exp(low - high))


def bounded(window: Window, fact: Fact, op: Op, bounds: tuple[float, float], least: float, guess: float, floor: float) -> Finding:
    at, name = place(window, op)
    return Finding(
        "output-range", "certain", "harmful", f"scores from {activation(op)} lie in {interval(*bounds)}: {fact.get('function')} cannot fall below {least:.2f}",
        f"Give {fact.get('function')} the raw scores: drop {quoted(window, at, activation(op))} or put a linear layer behind it.",
        Where.at(at, module=name, also=(str(fact.at),) if fact.at is not None and fact.at != at else ()), first_step=op.step,
        evidence=(Evidence(f"with scores in {interval(*bounds)} the lowest possible loss is {least:.3g}; a guess has {guess:.3g}", "criterion/input", least / guess, floor,
                           fact.get("sampled")),), treatment="logits", explains=("loss-plateau", "lr-too-low", "vanishing-gradients"))


def rectified(window: Window, fact: Fact, op: Op, binary: bool, left: float | None, unlearned: float) -> Finding:
    at, name = place(window, op)
    stuck = binary or (left is not None and left > unlearned)
    seen = f"; the loss ends at {left:.0%} of that of a guess" if left is not None else ""
    what = "no probability can fall below one half" if binary else "a class whose score is cut to 0 gets no gradient back"
    return Finding(
        "output-range", "certain", "harmful" if stuck else "note", f"{activation(op)} is applied to the scores before {fact.get('function')}",
        f"Give {fact.get('function')} the raw scores: drop {quoted(window, at, activation(op))}.",
        Where.at(at, module=name, also=(str(fact.at),) if fact.at is not None and fact.at != at else ()), first_step=op.step,
        evidence=(Evidence(f"the scores were made by {activation(op)}: {what}{seen}", "criterion/input", left, unlearned, fact.get("sampled")),),
        treatment="logits", explains=("loss-plateau", "dead-units"))


def generated(window: Window, share: float, excess: float) -> Iterator[Finding]:
    """A generator's bounded output and real data meet the same weights, by turns."""
    known = modules(window)
    for trace in window.traces:
        real: dict[int, Op] = {}
        made: dict[int, Op] = {}
        for op in trace.ops:
            uids = {trace.tensors[t].uid for t in op.ins if trace.tensors[t].uid >= 0 and trace.tensors[t].requires_grad}
            data = next((t for t in op.ins if trace.tensors[t].uid < 0 and len(trace.tensors[t].shape) >= 2), None)
            if op.name not in WEIGHTED or not uids or data is None:
                continue
            source, _ = origin(trace, data, op.index, CHOOSES | {"detach"})
            root = known.get(op.module, {}).get("root")
            if source is not None and reach(source) is not None and known.get(source.module, {}).get("root", root) != root:
                made.update(dict.fromkeys(uids, source))
            elif "raw" in op.values:
                real.update(dict.fromkeys(uids, op))
        for uid, source in made.items():
            bounds = reach(source)
            if uid in real and bounds is not None:
                pair = Pair("data", real[uid].at, None, trace, source, -1, {}, None, real[uid].values["raw"])
                beyond = pair.outside(*bounds)
                if beyond >= share and pair.excess(*bounds) >= excess * pair.target["std"]:
                    yield unreachable(window, pair, source, *bounds, beyond, None, share)
                    return
