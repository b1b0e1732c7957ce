from __future__ import annotations

import ast
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import script
from osler.rules.class_questions import LABEL_NAMES, argument_line, backwards, factor_line, number, shares, shuffled
from osler.rules.code_questions import enclosing
from osler.rules.graph_questions import criteria, loss_built

EXPLAINS = ("class-imbalance-metric", "loss-plateau")
INVERSE = "Weight a class by the inverse of its frequency (total / (classes * count)), in the order of the class indices."


@rule("class-weighting", "optimization")
def check(window: Window, *, skew: float = 2.5, ratio: float = 1.5, by_gradient: float = 4.0, double: float = 3.0, rare: float = 0.3) -> Iterator[Finding]:
    """Class weights favour the wrong class.

    What it is: weights that grow with the frequency of a class, a pos_weight of positives over negatives, inverse frequencies handed to
    the classes in another order, a focal alpha on the wrong class, a sampler that was given one weight a class instead of one a row,
    or classes that are balanced twice, by the sampler and again in the loss.
    How it is seen: the values of ``weight`` and ``pos_weight`` against the labels counted at the same criterion (classes `skew`
    apart in frequency and `ratio` in weight); for losses weighted by hand, the gradient that each class's losses really get
    (`by_gradient` apart, or any `ratio` where the text puts ``1 - alpha`` on the positives); for samplers, number of weights against
    number of rows, and the mean weight of each class.
    Why it matters: the rare class is learned worse than without any weights.
    What to do: inverse frequencies, ``weights=class_weights[labels]`` for a sampler, one correction instead of two.
    When this is wrong: a focal alpha of 0.25 on rare positives (RetinaNet's choice) is common and not reported; up-weighting the class
    whose errors cost most may be meant where classes are equally frequent, hence `skew`.
    Source: King & Zeng 2001; Lin et al. 2017 (focal loss, eq. 5); torch docs of WeightedRandomSampler and pos_weight.
    """
    for loader in {str(f.at): f for f in window.facts("loader")}.values():
        yield from sampled(window, loader, skew, ratio)
    balanced = any((f.get("sampler") == "WeightedRandomSampler") for f in window.facts("loader"))
    for fact in criteria(window):
        found = weighted(window, fact, skew, ratio, rare) or by_hand(window, fact, skew, ratio, by_gradient) or (twice(window, fact, double) if balanced else None)
        if found is not None:
            yield found
            return
    found = written(window, skew, ratio)
    if found is not None:
        yield found


def claim(title: str, fix: str, at: Location | None, evidence: Evidence, certainty: str = "certain", also: tuple[str, ...] = ()) -> Finding:
    return Finding("class-weighting", certainty, "harmful", title, fix, Where.at(at, also=also), first_step=0, evidence=(evidence,), explains=EXPLAINS)


def sampled(window: Window, loader: Fact, skew: float, ratio: float) -> Iterator[Finding]:
    figures = loader.get("sampler_weights") or {}
    n, rows = figures.get("n"), loader.get("rows")
    if not isinstance(n, int):
        return
    at = sampler_line(window, loader)
    if isinstance(rows, int) and n < rows and n <= 100 and n < 0.5 * rows:
        yield claim(f"WeightedRandomSampler got {n} weights for {rows} rows: only the first {n} rows are ever drawn",
                    "Give it one weight a row: weights=class_weights[labels].", at,
                    Evidence(f"{n} weights, {rows} rows in the data set", "loader/sampler_weights", value=n, threshold=rows, samples=1)).replace(
                        explains=(*EXPLAINS, "drop-last-data-loss", "no-shuffle-sorted", "overfit"))
        return
    counts, weights = (np.asarray(figures.get(k) or (), dtype=float) for k in ("class_counts", "class_weights"))
    seen = int((counts > 0).sum())
    if seen > 1 and 2 <= int(figures.get("distinct") or 0) <= seen and float(figures.get("class_spread") or 0.0) > 0.25 and counts.max() >= skew * counts[counts > 0].min():
        yield claim("The sampler's weights are not those of the rows' classes: they belong to other rows", "Compute the weights from the labels of the very data set that the loader draws from.",
                    argument_line(window, at, ("weights",), ("WeightedRandomSampler",)) or at,
                    Evidence(f"{figures['distinct']} weights for {seen} classes, and within a class they differ by {float(figures['class_spread']):.0%} on average", "loader/sampler_weights",
                             value=float(figures["class_spread"]), threshold=0.25, samples=int(counts.sum())))
        return
    pair = backwards(weights, counts, skew, ratio) if len(counts) == len(weights) else None
    if pair is not None:
        common, few = pair
        yield claim(f"The sampler draws class {common} more often although it is the common one already",
                    "Weight a row by the inverse of its class's count: weights=(1 / counts)[labels].",
                    argument_line(window, at, ("weights",), ("WeightedRandomSampler",)) or at,
                    Evidence(f"weight {weights[common]:.3g} a row for class {common} ({counts[common]:.0f} rows), {weights[few]:.3g} for class {few} ({counts[few]:.0f} rows)",
                             "loader/sampler_weights", value=float(weights[common] / max(weights[few], 1e-12)), threshold=1.0, samples=int(counts.sum())))


def sampler_line(window: Window, loader: Fact) -> Location | None:
    """Where the sampler is built; the loader's line where that is not in the same file."""
    at = loader.at
    module = script.tree(window, at.file) if at is not None else None
    made = list(script.calls(module, "WeightedRandomSampler"))
    if at is None or not made:
        return at
    before = [c for c in made if c.lineno <= at.line]
    return Location(at.file, max(before or made, key=lambda c: c.lineno).lineno)


def weighted(window: Window, fact: Fact, skew: float, ratio: float, rare: float) -> Finding | None:
    given, seen = fact.get("weights") or {}, shares(fact)
    at = loss_built(window, fact)
    also = (str(fact.at),) if fact.at is not None and fact.at != at else ()
    weights = np.asarray(given.get("weight") or (), dtype=float)
    if seen is not None and len(weights) == len(seen.counts) and seen.total >= 50:
        pair = backwards(weights, seen.counts, skew, ratio)
        if pair is not None:
            common, few = pair
            return claim(f"Class weights grow with frequency: the common class {common} weighs {weights[common] / max(weights[few], 1e-12):.3g} times class {few}", INVERSE,
                         argument_line(window, at, ("weight",)),
                         Evidence(f"class {common}: weight {weights[common]:.3g}, {seen.share[common]:.1%} of the labels; class {few}: weight {weights[few]:.3g}, {seen.share[few]:.1%}",
                                  "criterion/weight", value=float(weights[common] / max(weights[few], 1e-12)), threshold=ratio, samples=seen.total), also=also)
        mixed = shuffled(weights, seen.counts, skew)
        if mixed is not None:
            over, under = mixed
            return claim(f"Class weights are inverse frequencies in the wrong order: class {over} has the weight of a rarer class", INVERSE, argument_line(window, at, ("weight",)),
                         Evidence(f"weights {', '.join(f'{w:.3g}' for w in weights[:8])} for shares {', '.join(f'{s:.2g}' for s in seen.share[:8])}",
                                  "criterion/weight", value=float(weights[over] / weights[under]), threshold=float(seen.counts[under] / seen.counts[over]), samples=seen.total), also=also)
    extra = np.asarray(given.get("pos_weight") or (), dtype=float)
    positive = np.asarray(fact.get("positive_shares") or ([seen.share[1]] if seen is not None and len(seen.counts) == 2 else []), dtype=float)
    if len(extra) and len(positive) and len(extra) in (1, len(positive)):
        extra = np.broadcast_to(extra, positive.shape)
        wrong = ((positive < rare) & (positive > 0) & (extra < 0.7)) | ((positive > 1 - rare) & (extra > 1.5) & (np.abs(np.log(np.maximum(extra, 1e-9) * (1 - positive)
                                                                                                                             / np.maximum(positive, 1e-9))) < 0.4))
        if wrong.mean() > 0.5:
            i = int(np.argmax(wrong))
            return claim(f"pos_weight is upside down: {extra[i]:.3g} where {positive[i]:.1%} of the targets are positive", "Use negatives over positives: pos_weight=n_negative / n_positive.",
                         argument_line(window, at, ("pos_weight",)),
                         Evidence(f"pos_weight {extra[i]:.3g}; negatives over positives is {(1 - positive[i]) / max(positive[i], 1e-9):.3g}", "criterion/pos_weight",
                                  value=float(extra[i]), threshold=float((1 - positive[i]) / max(positive[i], 1e-9)), samples=seen.total if seen else None), also=also)
    return None


def by_hand(window: Window, fact: Fact, skew: float, ratio: float, by_gradient: float) -> Finding | None:
    """Losses of single rows that the user weights himself: the gradient each class's losses get."""
    pull, seen = fact.get("class_pull") or {}, shares(fact)
    if seen is None or seen.total < 50 or len(pull) < 2:
        return None
    weights = np.full(len(seen.counts), np.nan)
    for key, value in pull.items():
        weights[int(key)] = abs(float(value))
    counts = np.where(np.isfinite(weights), seen.counts, 0)
    line = alpha_line(window, fact)
    pair = backwards(np.nan_to_num(weights), counts, skew, ratio if line is not None else 2.0 if fact.get("class_pull_fixed") else by_gradient)
    if pair is None:
        return None
    common, few = pair
    place = line or factor_line(window, fact.at)
    return claim(f"The loss of the rare class {few} gets {weights[few] / weights[common]:.2g} times the weight of class {common}",
                 "Give the larger weight to the rare class (in the focal loss: alpha for the positives, 1 - alpha for the negatives).", place,
                 Evidence(f"gradient that a row's loss gets: {weights[common]:.3g} for class {common} ({seen.share[common]:.1%} of the labels), {weights[few]:.3g} for class {few} "
                          f"({seen.share[few]:.1%})", "criterion/class_pull", value=float(weights[common] / max(weights[few], 1e-12)), threshold=by_gradient, samples=seen.total),
                 "certain" if line is not None else "measured", (str(fact.at),) if fact.at is not None else ())


def alpha_line(window: Window, fact: Fact) -> Location | None:
    """The line where a focal alpha above 1/2 goes to the negatives: its expression is worked out for targets 0 and 1."""
    at = fact.at
    function = next(enclosing(window, at, (ast.FunctionDef,)), None)
    if function is None or at is None:
        return None
    names = script.words(function)
    alphas = [n for n in names if "alpha" in n.lower()]
    targets = [n for n in names if n.lower() in ("t", "y", "target", "targets", "label", "labels", "yb", "true", "gt", "y_true")]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and alphas and script.words(node.value) & set(alphas):
            for target in targets:
                for alpha in alphas:
                    ends = [number(window, at.file, node.value, {alpha: 0.9, f"self.{alpha}": 0.9, target: t}, node.lineno) for t in (0.0, 1.0)]
                    if ends[0] is not None and ends[1] is not None and abs(ends[0] - 0.9) < 1e-6 and abs(ends[1] - 0.1) < 1e-6:
                        return Location(at.file, node.lineno)
    return None


def twice(window: Window, fact: Fact, double: float) -> Finding | None:
    given, seen = fact.get("weights") or {}, shares(fact)
    figures = next((f.get("sampler_weights") for f in window.facts("loader") if f.get("sampler_weights")), None) or {}
    counts, drawn = (np.asarray(figures.get(k) or (), dtype=float) for k in ("class_counts", "class_weights"))
    if seen is None or seen.total < 50 or len(counts) != len(seen.counts) or len(drawn) != len(counts) or (counts <= 0).any() or (drawn <= 0).any():
        return None
    weights = np.asarray(given.get("weight") or (), dtype=float)
    extra = given.get("pos_weight") or []
    if len(extra) == 1 and len(counts) == 2:
        weights = np.asarray([1.0, extra[0]])
    if len(weights) != len(counts) or (weights <= 0).any():
        return None
    few, common = int(np.argmin(counts)), int(np.argmax(counts))
    if counts[common] < double * counts[few] or drawn[few] < double * drawn[common] or weights[few] < double * weights[common] \
            or seen.share[few] < 0.6 / len(counts):
        return None
    at = loss_built(window, fact)
    return claim(f"Classes are balanced twice: the sampler draws them evenly and the loss weighs class {few} {weights[few] / weights[common]:.3g} times class {common}",
                 "Drop the weights of the loss, or draw without the sampler.", at,
                 Evidence(f"class {few} has {seen.share[few]:.0%} of the labels seen ({counts[few] / counts.sum():.1%} of the rows) and still the larger weight", "criterion/weight",
                          value=float(weights[few] / weights[common]), threshold=double, samples=seen.total))


def written(window: Window, skew: float, ratio: float) -> Finding | None:
    """A cross entropy written out: the constants beside ``y * log p`` and ``(1 - y) * log(1 - p)``."""
    labels = window.stream("rows")
    labels = labels["label"][(labels["phase"] == 0) & np.isin(labels["label"], (0, 1))]
    if len(labels) < 50:
        return None
    counts = np.bincount(labels, minlength=2).astype(float)
    for file in window.sources:
        module = script.tree(window, file)
        for node in ast.walk(module) if module is not None else ():
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
                continue
            logs = [sum(1 for c in ast.walk(side) if isinstance(c, ast.Call) and script.call_name(c) in ("log", "logsigmoid")) for side in (node.left, node.right)]
            if logs != [1, 1]:
                continue
            shares_of = {f"share:{c}": float(counts[c] / counts.sum()) for c in (0, 1)}
            values = [factor(window, file, side, shares_of) for side in (node.left, node.right)]
            known = {int(v[1]): abs(v[0]) for v in values if v is not None}
            if len(known) == 2:
                weights = np.asarray([known[0], known[1]])
                pair = backwards(weights, counts, skew, ratio)
                if pair is not None:
                    common, few = pair
                    return claim(f"The term of the rare class {few} has the smaller weight ({weights[few]:.3g} against {weights[common]:.3g})", INVERSE, Location(file, node.lineno),
                                 Evidence(f"labels: {counts[few] / counts.sum():.1%} are {few}", "rows/label", value=float(weights[common] / max(weights[few], 1e-12)), threshold=ratio,
                                          samples=len(labels)))
    return None


def factor(window: Window, file: str, node: ast.expr, given: dict[str, float]) -> tuple[float, float] | None:
    """``(weight, class)`` of one term ``weight * y * log(p)`` or ``weight * (1 - y) * log(1 - p)``."""
    parts: list[ast.expr] = []
    stack: list[ast.expr] = [node]
    while stack:
        n = stack.pop()
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult):
            stack += [n.left, n.right]
        elif isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub):
            stack.append(n.operand)
        else:
            parts.append(n)
    weight, label = 1.0, -1.0
    for part in parts:
        if any(script.call_name(c) in ("log", "logsigmoid") for c in script.calls(part)):
            continue
        names = script.words(part)
        value = None if names & LABEL_NAMES and not names & {"mean", "sum"} else number(window, file, part, given, node.lineno)
        if value is not None:
            weight *= value
        elif names and all(n.lower() in LABEL_NAMES or n == "float" for n in names):
            label = 0.0 if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) else 1.0
        else:
            return None
    return (weight, label) if label >= 0 else None
