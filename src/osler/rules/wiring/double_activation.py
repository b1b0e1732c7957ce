from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import constructions, quoted, spot
from osler.rules.graph_questions import change_line, criteria, criterion_op, module_name, modules, origin, passes

APPLIES_ITSELF = {"cross_entropy": ("softmax", "sigmoid", "hardsigmoid"),
                  "binary_cross_entropy_with_logits": ("sigmoid", "softmax", "hardsigmoid"),
                  "multilabel_soft_margin_loss": ("sigmoid", "softmax"), "multi_margin_loss": ()}
SQUASHES = frozenset(("softmax", "sigmoid", "hardsigmoid"))
NODES = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid", "HardsigmoidBackward0": "hardsigmoid"}
CLASSES = {"softmax": "Softmax", "sigmoid": "Sigmoid", "hardsigmoid": "Hardsigmoid"}


@rule("double-activation", "wiring")
def check(window: Window, *, share: float = 0.99) -> Iterator[Finding]:
    """Softmax or sigmoid in front of a loss that applies it itself.

    What it is: the model already ends in a softmax or sigmoid, and the loss (cross_entropy, binary_cross_entropy_with_logits) applies
    its own on top; or one such activation feeds straight into another of its kind.
    How it is seen: the operation that made the loss's input, from the autograd graph and the recorded program; for a softmax also
    the rows of the input, which are non-negative and sum to 1 in at least `share` of the calls looked at.
    Why it matters: scores squeezed into [0, 1] leave the loss a floor (1.46 for ten classes instead of 0) and make gradients small.
    What to do: hand the raw scores to the loss; apply the activation only where probabilities are read.
    When this is wrong: a log-softmax in front of cross_entropy changes nothing and is not reported; neither are probabilities that are
    rescaled before the loss.
    Source: torch.nn.CrossEntropyLoss and BCEWithLogitsLoss documentation ("input is expected to contain the unnormalized logits").
    """
    for fact in criteria(window):
        function = str(fact.get("function"))
        made = NODES.get(str(fact.get("input_op")))
        if made not in APPLIES_ITSELF.get(function, ()):
            continue
        if made == "softmax" and function == "cross_entropy" and float(fact.get("rows_sum_one") or 0.0) < share:
            continue
        yield told(window, fact, made or "softmax")
        return
    yield from chained(window)


def told(window: Window, fact: Fact, made: str) -> Finding:
    function, calls = str(fact.get("function")), int(fact.get("sampled") or fact.get("calls") or 1)
    place, module = producer(window, fact, made)
    sums = f"; the rows of its input sum to 1 in {float(fact['rows_sum_one']):.0%} of {calls} calls" if made == "softmax" and fact.get("rows_sum_one") else ""
    own = "log-softmax" if function == "cross_entropy" else "sigmoid"
    also = tuple(str(p) for p in (fact.at, spot(fact.get("built_at"))) if p is not None and p != place)
    return Finding(
        "double-activation", "certain", "harmful", f"{made} is applied before {function}, which applies {own} itself",
        f"Remove the {made} at {quoted(window, place, f'the layer that feeds {function}')} and give {function} the raw scores; apply it only where you need probabilities.",
        Where.at(place, module=module, also=also), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"{function} gets the output of {made} ({fact.get('input_op')}){sums}", "criterion/input", value=fact.get("rows_sum_one"),
                           threshold=0.99 if made == "softmax" else None, samples=calls),),
        treatment="logits", explains=("lr-too-low", "loss-plateau", "vanishing-gradients"))


def producer(window: Window, fact: Fact, made: str) -> tuple[Location | None, str | None]:
    """Where the activation is made: its module's construction, else the line of the operation, else the module by class."""
    known = modules(window)
    call = criterion_op(window, fact)
    if call is not None:
        trace, op = call
        source, _ = origin(trace, op.ins[0], op.index)
        if source is not None and source.name == made:
            return change_line(known, source, (CLASSES[made],)), module_name(known, source.module)
    layers = [m for m in known.values() if m["class"] == CLASSES[made]]
    if layers:
        return spot(layers[-1].get("at")), layers[-1]["name"] or None
    lines = constructions(window, CLASSES[made]) or constructions(window, made)
    return (lines[-1] if len(lines) == 1 else fact.at), None


def chained(window: Window) -> Iterator[Finding]:
    """An activation directly on another one, on the way to a loss."""
    known = modules(window)
    for run in passes(window):
        for op in run.operations:
            if op.name not in ("softmax", "log_softmax", "sigmoid", "logsigmoid") or not op.ins or not op.grad:
                continue
            first, _ = origin(run.trace, op.ins[0], op.index)
            if first is None or first.name not in SQUASHES or not run.trace.tensors[op.ins[0]].requires_grad or not alike(run.trace.tensors[op.ins[0]].shape, first, op):
                continue
            place = change_line(known, first, CLASSES.values())
            second = change_line(known, op, ("Softmax", "Sigmoid", "LogSoftmax", "LogSigmoid"))
            yield Finding(
                "double-activation", "certain", "harmful", f"{op.name} is applied to the output of {first.name}",
                f"Keep one of the two activations: drop {quoted(window, place, first.name)} if the loss needs {op.name}.",
                Where.at(place, module=module_name(known, first.module), also=(str(second),) if second else ()), first_step=op.step,
                evidence=(Evidence(f"the output of {first.name} reaches {op.name} without anything in between, then the loss", "trace"),),
                treatment="logits", explains=("lr-too-low", "loss-plateau", "vanishing-gradients"))
            return


def alike(shape: tuple[int, ...], first: Op, second: Op) -> bool:
    """Two softmaxes over different axes are a design (Sinkhorn, routing); over the same one they are not."""
    if "softmax" not in first.name or "softmax" not in second.name:
        return True
    a, b = first.kw.get("dim"), second.kw.get("dim")
    return a is None or b is None or a % max(len(shape), 1) == b % max(len(shape), 1)
