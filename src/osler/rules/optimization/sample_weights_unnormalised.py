from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.class_questions import factor_line
from osler.rules.graph_questions import criteria


@rule("sample-weights-unnormalised", "optimization")
def check(window: Window, *, apart: float = 1.5, rows: int = 4) -> Iterator[Finding]:
    """Row weights do not average to one.

    What it is: the losses of single rows are multiplied by weights whose mean is not 1 and then averaged, so the weights also change the
    size of the loss; with other weights in another split, losses and metrics of the splits cannot be compared.
    How it is seen: the gradients that reach a criterion with ``reduction="none"`` differ from row to row and add up to something other than
    1 (by a factor of `apart`), in calls of at least `rows` rows.
    Why it matters: the weights act as a hidden learning rate, and weighted metrics are off by the same factor (the handbook reports an AUC
    0.03 too high).
    What to do: divide by the sum of the weights instead of their number: ``(w * loss).sum() / w.sum()``.
    When this is wrong: focal and other losses whose factor depends on the prediction have no fixed mean; where only the ratio between rows
    matters and the optimizer is Adam nothing is lost: hence a note.
    Source: handbook A32.
    """
    for fact in criteria(window):
        pull, by_class = fact.get("pull"), fact.get("class_pull") or {}
        numel = fact.get("result_numel") or 0
        if fact.get("reduction") != "none" or not pull or numel < rows or not by_class:
            continue
        values = [abs(float(v)) for v in by_class.values()]
        mean = abs(float(pull["first"]))
        if min(values) <= 0 or max(values) < 1.2 * min(values) or 1 / apart <= mean <= apart or mean >= 0.8 * numel:
            continue
        at = factor_line(window, fact.at)
        yield Finding("sample-weights-unnormalised", "measured", "note", f"Row weights average to {mean:.3g} instead of 1",
                      "Divide by the sum of the weights: (weight * loss).sum() / weight.sum(), in every split.", Where.at(at), first_step=int(fact.get("first_step") or 0),
                      evidence=(Evidence(f"the gradients of {numel} row losses add up to {mean:.3g}; by class they are {min(values):.3g} to {max(values):.3g} times those of a plain mean",
                                         "criterion/pull", value=mean, threshold=1.0, samples=int(pull["n"])),))
        return
