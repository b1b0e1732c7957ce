from __future__ import annotations

import math
from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import loaded
from osler.rules.graph_questions import criteria, loss_built


@rule("high-initial-loss", "signal")
def check(window: Window, *, excess: float = 3.0) -> Iterator[Finding]:
    """The first loss is far above that of a guess.

    **What it is.** An untrained classifier should know nothing: equal probabilities for K classes, a loss of log K. A much higher first loss means confident
    wrong scores.

    **How it is seen.** First value of a plain cross entropy over log K, above `excess`, in a model that was not loaded.

    **Why it matters.** The first steps are spent on unlearning; the cause (initialisation, unscaled inputs, scores multiplied by a factor) often does harm later too.

    **What to do.** Scale inputs, initialise the last layer small, look for a factor on the scores.

    **When this is wrong.** A small temperature in a contrastive loss multiplies the scores on purpose. It is a note: many such runs recover.

    **Source.** Karpathy, "A Recipe for Training Neural Networks" (2019): verify the loss at initialisation.
    """
    if loaded(window):
        return
    for fact in criteria(window):
        shape = (fact.get("input") or {}).get("shape") or []
        first = fact.get("value_first")
        if fact.get("function") != "cross_entropy" or len(shape) < 2 or shape[1] < 2 or fact.get("reduction") != "mean" or fact.get("weight") or fact.get("first_step"):
            continue
        guess = math.log(int(shape[1]))
        if isinstance(first, int | float) and math.isfinite(first) and first > excess * guess:
            yield Finding(
                "high-initial-loss", "measured", "note", f"The first loss is {first:.3g}; a guess among {shape[1]} classes has {guess:.3g}",
                "Look at the scale of inputs and initial weights, and for a factor on the scores.", Where.at(loss_built(window, fact)), first_step=0, last_step=0,
                evidence=(Evidence(f"first cross entropy {first:.4g}, log of {shape[1]} classes {guess:.4g}", "criterion/value_first", first / guess, excess, 1),))
            return
