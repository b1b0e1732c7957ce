from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import script
from osler.rules.class_questions import Shares, shares
from osler.rules.code_questions import calls_at
from osler.rules.graph_questions import criteria, loss_built

RANKED = re.compile(r"roc_auc|auroc|average_precision|pr_auc|precision_recall_curve|roc_curve|auc\(", re.I)
HONEST = re.compile(r"recall|f1|balanced|confusion|mcc|matthews|kappa|classification_report|sensitivity|per_class|macro", re.I)


@rule("class-imbalance-metric", "data")
def check(window: Window, *, rare: float = 0.2, recall: float = 0.05, rows: int = 12, min_steps: int = 60, margin: float = 0.02) -> Iterator[Finding | NotChecked]:
    """A rare class is ignored, and accuracy does not show it.

    What it is: a class with a small share of the labels is (almost) never predicted; the accuracy equals the share of the common class
    and looks fine.
    How it is seen: labels, predictions and hits by class in the newest calls of the criterion: a class below `rare` of the labels
    with a recall below `recall` over at least `rows` of its rows (five, where it was not answered once in 500), while accuracy stays within `margin` of the common classes' share,
    after `min_steps` steps.
    Why it matters: the class that is usually the reason for the model is not found.
    What to do: weight the loss by inverse frequency or draw rows by class; judge by recall, F1 or balanced accuracy by class, or move the
    decision threshold.
    When this is wrong: a score that is ranked (ROC-AUC, average precision) or thresholded elsewhere need not cross one half: where the
    script computes one, this is a note. A class that cannot be told from the others is rightly ignored by accuracy.
    Source: He & Garcia 2009; Google's "Rules of ML" on skewed data.
    """
    if window.n_steps < min_steps:
        yield NotChecked("class-imbalance-metric", f"needs at least {min_steps} steps")
        return
    text = "\n".join(window.sources.values())
    for fact in (*criteria(window, validation=True), *criteria(window)):
        seen = shares(fact)
        if seen is None or seen.late is None or not judged(fact):
            continue
        found = ignored(seen, rare, recall, rows, margin)
        if found is None:
            continue
        index, accuracy, common = found
        train = next((f for f in criteria(window) if shares(f) is not None), fact)
        at: Location | None = aliased(window, train, loss_built(window, train))
        labels, _, hits = seen.late
        weighted = bool(train.get("weights")) or lifted(train, index) or any(f.get("sampler") == "WeightedRandomSampler" for f in window.facts("loader"))
        quiet = RANKED.search(text) is not None or weighted
        yield Finding(
            "class-imbalance-metric", "measured", "note" if quiet else "harmful",
            f"Class {index} ({seen.share[index]:.1%} of the labels) is never found: recall {hits[index] / labels[index]:.0%} at an accuracy of {accuracy:.1%}",
            "Weight the loss by inverse class frequency (or draw rows by class), and judge by recall or F1 of each class"
            + ("." if HONEST.search(text) else " instead of accuracy."),
            Where.at(at, also=(str(fact.at),) if fact.at is not None and fact.at != at else ()), first_step=int(train.get("first_step") or 0), last_step=window.n_steps,
            evidence=(Evidence(f"{int(hits[index])} of {int(labels[index])} rows of class {index} were predicted as such in the newest calls; always answering with the common "
                               f"class would give {common:.1%}", "criterion/late", value=float(hits[index] / labels[index]), threshold=recall, samples=int(labels.sum())),))
        return


def aliased(window: Window, fact: Fact, at: Location | None) -> Location | None:
    """Where a function of torch got the name it is called by (``criterion = F.cross_entropy``)."""
    if at is None or at != fact.at or str(fact.get("function")) in window.line(at.file, at.line):
        return at
    for call in calls_at(window, at):
        name = script.dotted(call.func)
        found = script.origin(window, at, name) if name else None
        if isinstance(found, ast.Assign) and str(fact.get("function")) in script.words(found.value):
            return Location(at.file, found.lineno)
    return at


def lifted(fact: Fact, index: int) -> bool:
    """Whether the rare class is weighted up by hand."""
    pull = fact.get("class_pull") or {}
    own, others = pull.get(str(index)), [v for c, v in pull.items() if c != str(index)]
    return own is not None and bool(others) and abs(own) >= 1.5 * abs(max(others, key=abs))


def judged(fact: Fact) -> bool:
    """Losses that pick one class; masked or token-wise criterions have other questions."""
    shape = (fact.get("input") or {}).get("shape") or ()
    return len(shape) <= 2 and (fact.get("ignored_share") or 0) == 0


def ignored(seen: Shares, rare: float, recall: float, rows: int, margin: float, few: int = 5) -> tuple[int, float, float] | None:
    """``(class, accuracy, share of the most common class)``."""
    assert seen.late is not None
    labels, predicted, hits = seen.late
    total = labels.sum()
    if total < 50 or len(labels) > 10:  # a class of one in a hundred: fewer rows say enough where it was not answered once
        return None
    share = labels / total
    accuracy, common = float(hits.sum() / total), float(share.max())
    if common < 0.5 or accuracy < common - margin:
        return None
    for index in np.argsort(labels):
        enough = labels[index] >= rows or (labels[index] >= few and predicted[index] == 0 and total >= 500)
        if enough and share[index] < rare and hits[index] / labels[index] < recall and predicted[index] < 0.1 * labels[index]:
            return int(index), accuracy, common
    return None
