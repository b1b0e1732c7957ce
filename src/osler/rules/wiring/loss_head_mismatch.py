from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import constructions, quoted, spot
from osler.rules.graph_questions import criteria, loss_built

SIGNED = {"soft_margin_loss": "-1 or 1", "hinge_embedding_loss": "-1 or 1", "margin_ranking_loss": "-1 or 1", "cosine_embedding_loss": "-1 or 1"}
POSITIVE_OUTPUT = ("ExpBackward0", "SoftplusBackward0", "ReluBackward0", "SigmoidBackward0")
MESSAGES = (
    ("Target ", " is out of bounds", "a class index is not below the number of outputs", "Give the last layer as many outputs as there are classes, or renumber the classes from 0."),
    ("all elements of input should be between 0 and 1", "", "binary_cross_entropy gets values outside [0, 1]",
     "Use binary_cross_entropy_with_logits on the raw scores, or apply a sigmoid first."),
    ("all elements of target should be between 0 and 1", "", "binary_cross_entropy gets targets outside [0, 1]", "Map the targets to 0 and 1."),
    ("var has negative entr", "", "gaussian_nll_loss gets negative variances", "Make the variance positive: softplus or exp of the output."),
    ("multi-target not supported", "", "the loss wants one class index for each sample and gets a row", "Pass class indices of shape [batch]."),
)


@rule("loss-head-mismatch", "wiring")
def check(window: Window) -> Iterator[Finding]:
    """Number or meaning of the outputs does not fit the loss.

    What it is: several labels at once under a softmax loss, one output under a softmax, labels of another coding than the loss
    reads (0/1 where it wants -1/1, class numbers where it wants 0/1), rates where it wants log-rates, classes beyond the outputs.
    How it is seen: values and row sums of the targets, the shape of the input and the operation that made it, at every criterion
    call looked at; or the exception that the loss raised.
    Why it matters: the loss has its minimum somewhere else than the task, or no gradient at all.
    What to do: choose the loss for the coding of the labels (several labels: BCEWithLogitsLoss), or recode the labels.
    When this is wrong: soft labels whose rows sum to 1 (mixup, distillation, smoothing) fit cross_entropy and are not reported.
    Source: torch.nn documentation of each loss; handbook A3.
    """
    for fact in criteria(window):
        found = claim(fact)
        if found is not None:
            severity, title, evidence, fix = found
            place = loss_built(window, fact)
            also = (str(fact.at),) if fact.at is not None and fact.at != place else ()
            yield Finding("loss-head-mismatch", "certain", severity, title, fix.format(line=quoted(window, place, str(fact.get("function")))),
                          Where.at(place, also=also), first_step=fact.get("first_step", fact.step), evidence=(evidence,), explains=("output-range", "loss-plateau"))
            return
    yield from raised(window)


def claim(fact: Fact) -> tuple[str, str, Evidence, str] | None:
    function, calls = str(fact.get("function")), int(fact.get("sampled") or 1)
    shape: list[int] = list((fact.get("input") or {}).get("shape") or ())
    target: dict[str, Any] = fact.get("target") or {}
    low, high = fact.get("target_min"), fact.get("target_max")
    floating = "float" in str(target.get("dtype"))
    if function in ("cross_entropy", "nll_loss") and len(shape) == 2 and shape[1] == 1 and fact.get("single_unit", 1.0) == 1.0:
        return ("fatal", f"{function} over a single output is constant 0",
                Evidence(f"the input has shape {shape}: a softmax over one class is always 1", "criterion/input", value=1, threshold=2, samples=calls),
                "Use binary_cross_entropy_with_logits at {line} (with float targets), or two outputs.")
    if function == "cross_entropy" and floating and target.get("shape") == shape and len(shape) == 2 and shape[1] > 1:
        rows = float(fact.get("target_rows_sum_one") if fact.get("target_rows_sum_one") is not None else 1.0)
        if rows < 0.5 and float(fact.get("target_integers") or 0.0) > 0.99 and low is not None and low >= 0 and high == 1:
            return ("harmful", "cross_entropy gets rows with several labels (or none) as if they were class probabilities",
                    Evidence(f"targets are 0 or 1 and their rows do not sum to 1 in {1 - rows:.0%} of {calls} calls", "criterion/target", value=rows, threshold=1.0, samples=calls),
                    "Use nn.BCEWithLogitsLoss in place of {line}: each label is a question of its own.")
        if rows < 0.5:
            return ("note", "cross_entropy gets class weights whose rows do not sum to 1",
                    Evidence(f"target rows sum to 1 in {rows:.0%} of {calls} calls", "criterion/target", value=rows, threshold=1.0, samples=calls),
                    "Normalise the target rows, or choose another loss than {line}.")
    if function in ("binary_cross_entropy_with_logits", "multilabel_soft_margin_loss") and low is not None and high is not None and (low < 0 or high > 1):
        return ("harmful", f"{function} gets targets outside [0, 1]",
                Evidence(f"targets lie in [{low:g}, {high:g}]", "criterion/target", value=high, threshold=1.0, samples=calls),
                "Recode the targets to 0 and 1, or use a loss for their coding in place of {line}.")
    if function in SIGNED and low == 0 and float(fact.get("target_integers") or 0.0) > 0.99:
        return ("harmful", f"{function} wants targets of {SIGNED[function]} and gets zeros",
                Evidence(f"targets lie in [{low:g}, {high:g}]; a target of 0 gives no gradient towards either side", "criterion/target", value=low, threshold=-1.0, samples=calls),
                "Map the labels with 2 * y - 1 before {line}.")
    if function == "poisson_nll_loss" and fact.get("log_input", False) is not False and fact.get("input_op") in POSITIVE_OUTPUT:
        return ("harmful", "poisson_nll_loss expects the logarithm of the rate and gets the rate",
                Evidence(f"the input was made by {fact.get('input_op')}, so it is a rate; log_input is True", "criterion/input", samples=calls),
                "Pass log_input=False at {line}, or give it the raw output.")
    return None


def raised(window: Window) -> Iterator[Finding]:
    """The loss refused its arguments (not if they were NaN)."""
    if window.facts("nonfinite"):
        return
    for fact in window.facts("exception"):
        message = str(fact.get("message"))
        for start, end, what, cure in MESSAGES:
            if start in message and end in message:
                frames = [p for p in map(spot, fact.get("frames") or ()) if p is not None]
                place = fact.at or (frames[0] if frames else None)
                called = [f for f in criteria(window) if f.at == place]
                losses = constructions(window, "BCELoss") if "between 0 and 1" in start else []
                built = loss_built(window, called[-1]) if called else losses[0] if len(losses) == 1 else place
                yield Finding("loss-head-mismatch", "certain", "fatal", what, cure, Where.at(built, also=(str(place),) if built != place else ()),
                              first_step=fact.get("first_step", fact.step), evidence=(Evidence(f"{fact.get('type')}: {message[:160]}", "exception"),), explains=("script-failed",))
                return
