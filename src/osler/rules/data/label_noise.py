from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.order_steps import labelish
from osler.rules.pairing import Dependence, dataset_pair_line, deliberate, dependence, on_purpose, parted
from osler.rules.script import FUNCTIONS, around, call_name, origin, tree, words

DRAWN = frozenset(("randint", "randrange", "integers", "choice", "choices", "permutation", "sample", "random_integers", "randint_like", "multinomial"))
FLIP = frozenset(("flip", "flipped", "noisy", "noise", "corrupt", "bad", "wrong"))


@rule("label-noise", "data")
def check(window: Window, *, contradicted: float = 0.15, apart: float = 0.12, errors: float = 5.0, coded: float = 0.75) -> Iterator[Finding | NotChecked]:
    """A large share of the training labels is wrong.

    **What it is.** Labels that were overwritten at random, given by careless annotators, or coded by a table that is not the one used for
    validation. A model fits the right ones first and then learns the wrong ones by heart.

    **How it is seen.** A kernel regression on the training rows predicts each row from the others. Among the surest half of its predictions the
    share that the given label contradicts is `contradicted` or more, and `apart` (and `errors` standard errors) above the same share on the
    validation rows, predicted by the same regression: what is hard by nature is as hard there. For measured quantities: the predictions agree
    with the validation targets far better than with the left-out training targets. Labels that are chance altogether while those of the
    validation rows are not; classes that must be renamed, one for one, to fit (`coded` of the rows right then). Another array of
    labels of the same rows that differs from the training labels where the inputs contradict them. Where the text overwrites labels with random ones and
    validation is no yardstick, the share alone counts.

    **Why it matters.** The gradient of a wrong label is as large as that of a right one; with 40 % of them the best epoch comes early and
    the last one is worse.

    **What to do.** Find where the labels are written; look at the rows whose label contradicts sure predictions; code classes by one table.

    **When this is wrong.** Strong augmentation that changes the class, training rows from another source than validation, deliberate noise
    (names that say so make it a note). Labels that are uncertain by nature are as uncertain in validation and do not count.

    **Source.** Zhang et al. 2017; Northcutt et al. 2021 (confident learning). Handbook A §17.
    """
    dep = dependence(window)
    if dep is None or not dep.used:
        yield NotChecked("label-noise", "the training rows could not be read beside their targets")
        return
    fact = dep.fact
    n, m = int(fact.get("rows") or 0), int(fact.get("other_rows") or 0)
    other = fact.get("other_contradicted")
    share = float(fact.get("contradicted") or 0.0)
    varied = any(f.get("name") == "item-repeat" and f.get("random") and f.get("loader") == fact.get("loader") for f in window.facts("experiment"))
    if varied:  # items are augmented: what a row loses by that is no fault of its label
        contradicted, apart = max(contradicted, 0.25), max(apart, 0.2)
    judged = fact.get("other") is not None and any(f.get("name") == "item-repeat" and f.get("random") and f.get("loader") != fact.get("loader") for f in window.facts("experiment"))
    if varied and not judged and m and overwritten(window) is None:
        return  # augmented rows are harder than those of validation: no yardstick
    if dep.independent:
        yield from random_labels(window, dep)
        return
    if fact.get("classes") and m:
        away = float(other or 0.0)
        error = (share * (1 - share) / max(n / 2, 1) + max(away, 0.02) * (1 - away) / max(m / 2, 1)) ** 0.5
        if share >= contradicted and share - away >= max(apart, errors * error) and away <= 0.6 * share:
            yield finding(window, dep, "measured", f"{share:.0%} of the sure predictions contradict the training label; in validation {away:.0%}",
                          Evidence(f"surest half of {n} leave-one-out predictions: {share:.1%} contradicted; of {m} validation rows {away:.1%}",
                                   "experiment/label-dependence", share, max(contradicted, away + apart), n))
            return
        mapped = fact.get("mapped")
        if share <= 0.2 and away >= 0.4 and mapped is not None and float(mapped) >= coded and float(mapped) - float(fact.get("other_score") or 0) >= 0.3:
            yield finding(window, dep, "measured", "Training and validation number the classes differently",
                          Evidence(f"{float(fact.get('other_score') or 0):.0%} of {m} validation rows are told right; with the classes renamed one for one {float(mapped):.0%}",
                                   "experiment/label-dependence", float(mapped), coded, m), coding=True)
            return
    elif not fact.get("classes") and m and not varied and fact.get("other_score") is not None:
        gain = float(fact["other_score"]) - dep.score
        if gain >= max(2 * apart, errors * (1 / n + 1 / m) ** 0.5 * 0.7) and float(fact["other_score"]) >= 0.6:
            yield finding(window, dep, "measured", f"Predictions fit validation targets ({float(fact['other_score']):.2f}) better than training targets ({dep.score:.2f})",
                          Evidence(f"rank correlation of leave-one-out predictions {dep.score:.2f} on {n} training rows, {float(fact['other_score']):.2f} on {m} validation rows",
                                   "experiment/label-dependence", gain, 2 * apart, n))
            return
    head, tail = fact.get("head"), fact.get("tail")
    if fact.get("classes") and head is not None and tail is not None and int(fact.get("loader", -1)) < 0 and float(head) >= contradicted \
            and float(head) - float(tail) >= max(apart, errors * (float(head) / (0.3 * n)) ** 0.5) and float(tail) <= 0.4 * float(head):
        yield finding(window, dep, "measured", f"{float(head):.0%} of the sure predictions contradict the label in the first rows, {float(tail):.0%} in the last ones",
                      Evidence(f"surest half of the leave-one-out predictions: {float(head):.1%} contradicted in the first 60 % of {fact.get('total')} rows, {float(tail):.1%} in the last 15 %",
                               "experiment/label-dependence", float(head), contradicted, n))
        return
    paired, by_chance = fact.get("paired"), float(fact.get("chance") or 0.0)
    if fact.get("classes") and isinstance(paired, float) and by_chance + 0.2 < paired < 1 - contradicted and share >= contradicted and not varied:
        yield finding(window, dep, "measured", f"{1 - paired:.0%} of the training labels differ from {fact.get('pair')}, and the inputs side with the latter",
                      Evidence(f"of {fact.get('batch')} labels of a batch {paired:.0%} are those of {fact.get('pair')} at the same rows; {share:.1%} of the surest half of {n} leave-one-out predictions "
                               "contradict the training label", "experiment/label-dependence", 1 - paired, contradicted, n))
        return
    written = overwritten(window)
    if written is not None and fact.get("classes") and share >= (contradicted if written[1] else 0.25):
        yield finding(window, dep, "suspected", f"Labels are overwritten at random, and {share:.0%} of the sure predictions contradict the label",
                      Evidence(f"surest half of {n} leave-one-out predictions: {share:.1%} contradicted", "experiment/label-dependence", share, contradicted, n))


def random_labels(window: Window, dep: Dependence, sure: float = 8.0, gain: float = 0.1) -> Iterator[Finding]:
    """Training labels are chance, validation labels are not, and no other order of the rows makes sense of them."""
    fact = dep.fact
    told = float(fact.get("other_own_score") or 0.0) - float(fact.get("other_own_null") or 0.0)  # beside a rare class chance scatters by less than a row
    if float(fact.get("other_own_z") or 0.0) < sure or told < gain or dep.better_z >= sure or any(m.kind in ("chance", "sort", "times", "offset") for _, m in parted(window)):
        return
    yield finding(window, dep, "measured", "Training labels say nothing about their inputs, validation labels do",
                  Evidence(f"leave-one-out score {dep.score:.2f} on {fact.get('rows')} training rows (random order {dep.null:.2f} ± {dep.spread:.2f}); "
                           f"{float(fact.get('other_own_score') or 0):.2f} on the validation rows among themselves", "experiment/label-dependence", dep.score, dep.null + 4 * dep.spread,
                           int(fact.get("rows") or 0)))


def finding(window: Window, dep: Dependence, certainty: str, title: str, evidence: Evidence, coding: bool = False) -> Finding:
    written = overwritten(window)
    at = coding_line(window) if coding else written[0] if written is not None else None
    at = at or drawn_target(window) or dataset_pair_line(window, dep) or target_origin(window, dep)
    meant = deliberate(window) or (at is not None and on_purpose(window, at.file, (at.line,)))
    return Finding("label-noise", certainty, "note" if meant else "harmful", title,
                   ("Code the classes by one table for all rows" if coding else "Look where the labels are written") + f", at {quoted(window, at, 'the labels')}.",
                   Where.at(at), first_step=0, evidence=(evidence,), explains=("overfit", "loss-plateau"))


def overwritten(window: Window) -> tuple[Location, bool] | None:
    """Existing labels that are replaced: ``y[bad] = randint(...)``, ``label = randrange(10)`` under a condition, ``where(flip, other, y)``. Second: by drawn
    labels (rather than by their opposite)."""
    for file in window.sources:
        module = tree(window, file)
        for node in ast.walk(module) if module is not None else ():
            target, value = stored(node)
            if target is None or value is None or not labelish(target):
                continue
            drawn = any(call_name(c) in DRAWN for c in ast.walk(value) if isinstance(c, ast.Call))
            inside = around(window, Location(file, node.lineno))  # type: ignore[attr-defined]
            part = isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice | ast.Constant)
            chosen = isinstance(value, ast.IfExp) or any(isinstance(c, ast.Call) and call_name(c) == "where" for c in ast.walk(value))
            under = any(isinstance(s, ast.If) and chance(s.test) for s in inside[-3:])
            if drawn and (part or chosen or under):
                return Location(file, node.lineno), True  # type: ignore[attr-defined]
            if (part or chosen or under) and words(node) & FLIP:
                return Location(file, node.lineno), False  # type: ignore[attr-defined]
    return None


def chance(test: ast.expr) -> bool:
    return any(isinstance(c, ast.Call) and call_name(c) in ("random", "rand", "uniform", "random_sample", "bernoulli") for c in ast.walk(test))


def stored(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return node.targets[0], node.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and call_name(node.value) == "append" and isinstance(node.value.func, ast.Attribute) and node.value.args:
        return node.value.func.value, node.value.args[0]
    return None, None


def drawn_target(window: Window) -> Location | None:
    """Labels made by a draw: ``targets = randint(...)``, or in a function whose name says labels."""
    for file in window.sources:
        module = tree(window, file)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, FUNCTIONS) and labelish(ast.Name(node.name)):
                found = [c.lineno for c in ast.walk(node) if isinstance(c, ast.Call) and call_name(c) in DRAWN]
                if found:
                    return Location(file, found[0])
            target, value = stored(node)
            if target is not None and value is not None and labelish(target) and isinstance(value, ast.Call) and any(
                    call_name(c) in DRAWN for c in ast.walk(value) if isinstance(c, ast.Call)):
                return Location(file, node.lineno)  # type: ignore[attr-defined]
    return None


def coding_line(window: Window) -> Location | None:
    """Where class names become numbers: ``classes.index(v)``, ``{c: i for i, c in enumerate(...)}``, ``fit_transform``, ``factorize``."""
    for file in window.sources:
        module = tree(window, file)
        made: list[int] = []
        for node in ast.walk(module) if module is not None else ():
            if (isinstance(node, ast.Call) and call_name(node) in ("index", "factorize", "LabelEncoder", "fit_transform", "unique", "set", "get_dummies")) or (isinstance(node, ast.DictComp) and any(isinstance(c, ast.Call) and call_name(c) == "enumerate" for c in ast.walk(node))):
                made.append(node.lineno)
        if made:
            return Location(file, min(made))
    return None


def target_origin(window: Window, dep: Dependence) -> Location | None:
    name: Any = dep.fact.get("pair")
    criterion = next((f for f in window.facts("criterion") if f.get("phase") == 0), None)
    if criterion is None or criterion.at is None or not isinstance(name, str):
        return criterion.at if criterion is not None else None
    made = origin(window, criterion.at, name)
    return Location(criterion.at.file, made.lineno) if made is not None else criterion.at
