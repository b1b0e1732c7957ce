from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import TRAIN, VALIDATION, batch_figures, dataset_line, loaders, roles
from osler.rules.order_steps import labelish
from osler.rules.rows_compared import number, part, tables
from osler.rules.script import around, call_name, calls, origin, repeats_same_input, root, targets, tree
from osler.rules.splits import drawn_split, says_time, sites


@rule("val-preprocessing-mismatch", "evaluation")
def check(window: Window, *, ratio: float = 1.8, shift: float = 1.0, spreads: float = 6.0, far: float = 3.0) -> Iterator[Finding]:
    """Validation inputs are prepared differently from training inputs.

    **What it is.** A normalisation, scaling or channel order that training inputs get is missing (or different) for the
    validation inputs, or the reverse.

    **How it is seen.** Mean and standard deviation of the input batches of both loaders: the scales differ by `ratio` or
    the means by `shift` standard deviations, and by more than `spreads` times their scatter from batch to batch. Without
    loaders the inputs of the model itself, or the columns of both tables, are compared, with twice the margin, and only if validation loss is worse too. Where the
    script fits two kinds of scaler, one of them on the validation rows, the distance `far` between the two sides in the
    principal components of the training rows (in deviations) counts.

    **Why it matters.** The model is judged on inputs of a kind it was never trained on; the true figure is better.

    **What to do.** Give both sides the same deterministic preprocessing, with constants fitted on the training rows.

    **When this is wrong.** A deliberate shift of domain between the two sets. Parts of one table or data set are left alone; where the script
    divides a series by time, what lies later may lie elsewhere: a note.

    **Source.** RT-DETR issue 312.
    """
    found = by_loader(window, ratio, shift, spreads) or by_input(window, 2 * ratio, 2 * shift) or by_scaler(window, far) or by_table(window, 2 * ratio, 2 * shift)
    if found is None or one_table(window):
        return
    drifts = len(says_time(window)) >= 2 and drawn_split(window) is None and any(s.drawn is None for s in sites(window))
    yield replace(found, severity="note", certainty="suspected") if drifts else found


def one_table(window: Window) -> bool:
    """The rows of both sides were found in one table (or are parts of one data set): prepared alike, however far apart they lie."""
    return any(part(fact, "order") for fact in tables(window))


def differ(a: tuple[float, float], b: tuple[float, float], ratio: float, shift: float) -> bool:
    """Whether two (mean, std) pairs are of different scale or place."""
    if min(a[1], b[1]) <= 1e-12 or not all(map(math.isfinite, (*a, *b))):
        return False
    return not 1 / ratio < a[1] / b[1] < ratio or abs(a[0] - b[0]) > shift * max(a[1], b[1])


def worse(window: Window, margin: float = 1.3) -> bool | None:
    """Whether validation loss lies above training loss; ``None`` where one of them was not seen."""
    val = window.calls[(window.calls["phase"] == 1) & np.isfinite(window.calls["value"])]
    train = window.steps[np.isfinite(window.steps["loss"])]
    pairs = []
    for step in np.unique(val["step"]):
        before = train[(train["step"] <= step) & (train["step"] > step - 100)]["loss"][-20:]
        if len(before):
            pairs.append((float(np.median(before)), float(np.mean(val[val["step"] == step]["value"]))))
    if not pairs:
        return None
    a, b = (float(np.median(x)) for x in zip(*pairs[len(pairs) // 2:], strict=True))
    return b > margin * a if a > 0 else b > a


def finding(at: Location | None, also: Location | None, train: tuple[float, float], val: tuple[float, float], samples: int, what: str) -> Finding:
    factor = max(train[1] / val[1], val[1] / train[1])
    return Finding(
        "val-preprocessing-mismatch", "measured", "harmful",
        f"Validation inputs have mean {val[0]:.3g} and std {val[1]:.3g}, training inputs {train[0]:.3g} and {train[1]:.3g}",
        "Apply the same preprocessing to validation as to training (same transform, constants fitted on training rows).",
        Where.at(at, also=(str(also),) if also is not None and str(also) != str(at) else ()),
        evidence=(Evidence(f"{what}: standard deviations differ by a factor of {factor:.3g}, means by "
                           f"{abs(train[0] - val[0]) / max(train[1], val[1]):.2g} standard deviations", "input", factor, None, samples),),
        treatment="normalise-inputs")


def by_loader(window: Window, ratio: float, shift: float, spreads: float) -> Finding | None:
    known, role = loaders(window), roles(window)
    sides = {i: batch_figures(window, i) for i in role}
    for v in (i for i, r in role.items() if r == VALIDATION and len(sides[i][0])):
        trained = [i for i, r in role.items() if r == TRAIN and len(sides[i][0])]
        if not trained or worse(window) is False:
            return None
        gaps = []
        for t in trained:
            train, val = ((float(np.median(m)), float(np.median(s))) for m, s in (sides[t], sides[v]))
            scatter = [float(np.std(x)) if len(x) > 1 else 0.0 for x in (*sides[t], *sides[v])]
            real = abs(train[0] - val[0]) > spreads * max(scatter[0], scatter[2]) or abs(train[1] - val[1]) > spreads * max(scatter[1], scatter[3])
            gaps.append((differ(train, val, ratio, shift) and real, train, val))
        if v in known and all(g[0] for g in gaps):
            _, train, val = gaps[0]
            return finding(transform_line(window, known[v].at) or dataset_line(window, known[v]), known[v].at, train, val, len(sides[trained[0]][0]) + len(sides[v][0]),
                           "inputs as served by the two loaders")
    return None


def by_input(window: Window, ratio: float, shift: float) -> Finding | None:
    """Inputs of the model itself: one batch of each side, hence the wide margin and the look at the loss."""
    sides: dict[object, dict[str, list[Fact]]] = {}
    for f in window.facts("input"):
        sides.setdefault(f.get("root"), {}).setdefault(TRAIN if f.get("phase") in (0, TRAIN) else VALIDATION, []).append(f)
    for both in sides.values():
        train, val = both.get(TRAIN), both.get(VALIDATION)
        if not train or not val or "int" in str(val[0].get("dtype")) or not worse(window, 1.5):
            continue
        a, b = figures(train), figures(val)
        at = next((p.at for p in window.facts("phase") if p.get("kind") == "validation" and p.at is not None), val[0].at)
        same = list(train[0].get("shape") or ())[1:] == list(val[0].get("shape") or ())[1:]
        if same and at is not None and differ(a, b, ratio, shift) and not repeats_same_input(window, at):
            return finding(prepared(window, at), at, a, b, len(train) + len(val), "inputs of the model in a training step and in validation")
    return None


def figures(facts: list[Fact]) -> tuple[float, float]:
    return (float(np.median([f.get("mean") or 0.0 for f in facts])), float(np.median([f.get("std") or 0.0 for f in facts])))


def prepared(window: Window, at: Location) -> Location:
    """Where the argument of the evaluating call was made."""
    statements = around(window, at)
    for call in calls(statements[-1] if statements else None):
        name = root(call.args[0]) if call.args and call.lineno == at.line else None
        found = origin(window, at, name) if name else None
        if found is not None:
            return Location(at.file, found.lineno)
    return at


SCALER = re.compile(r"(Scaler|Normalizer|QuantileTransformer|PowerTransformer)$")
SIDE = re.compile(r"^(va|val|valid|validation|te|test|eval|dev|hold\w*)$|(^|_)(val|valid|test|eval)", re.I)


def transform_line(window: Window, at: Location | None) -> Location | None:
    """Where the transform of the validation side is put together: an entry of a table of transforms, a name of its own."""
    module = tree(window, at.file) if at is not None else None
    for node in ast.walk(module) if at is not None and module is not None else ():
        if isinstance(node, ast.Dict):
            entries = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant) and isinstance(k.value, str)}
            side = next((v for k, v in entries.items() if SIDE.search(k) and isinstance(v, ast.Call | ast.List) and call_name_or_list(v)), None)
            if side is not None and any(k.startswith("tr") for k in entries):
                return Location(at.file, side.lineno)  # type: ignore[union-attr]
        elif isinstance(node, ast.Assign) and any(SIDE.search(t) and re.search(r"transf|tfm?s?$|aug|prep|norm", t, re.I) for t in targets(node)):
            return Location(at.file, node.lineno)  # type: ignore[union-attr]
    return None


def call_name_or_list(node: ast.expr) -> bool:
    return isinstance(node, ast.List) or (isinstance(node, ast.Call) and bool(re.search(r"Compose|Sequential|transf", call_name(node), re.I)))


def by_scaler(window: Window, far: float) -> Finding | None:
    """Two kinds of scaler are fitted on inputs, and the sides lie far apart."""
    fact = next((f for f in reversed(window.facts("experiment")) if f.get("name") == "label-dependence" and f.get("apart") is not None), None)
    if fact is None or float(fact["apart"]) < far:
        return None
    for file in window.sources:
        module = tree(window, file)
        fitted: dict[str, int] = {}
        for call in calls(module, "fit_transform", "fit"):
            if not call.args or labelish(call.args[0]) or not isinstance(call.func, ast.Attribute):
                continue
            holder = call.func.value
            made = holder if isinstance(holder, ast.Call) else next((n.value for n in ast.walk(module) if isinstance(n, ast.Assign) and root(holder) in targets(n) and isinstance(n.value, ast.Call)), None) \
                if module is not None else None
            if isinstance(made, ast.Call) and SCALER.search(call_name(made)):
                fitted.setdefault(call_name(made), call.lineno)
        if len(fitted) == 2:
            (one, first), (two, second) = fitted.items()
            return Finding(
                "val-preprocessing-mismatch", "measured", "harmful", f"One side is scaled by {one}, the other by {two}",
                "Fit one scaler on the training rows and apply it to both sides.", Where.at(Location(file, max(first, second)), also=(f"{file}:{min(first, second)}",)),
                evidence=(Evidence(f"centroids of training and validation rows are {float(fact['apart']):.2g} deviations apart in the principal components of the training rows",
                                   "experiment/label-dependence", float(fact["apart"]), far, int(fact.get("other_rows") or 0)),), explains=("splits-apart",))
    return None


def by_table(window: Window, ratio: float, shift: float) -> Finding | None:
    """The rows of both sides as the comparison found them: the typical column has another scale or place, and the loss is worse."""
    for fact in tables(window):
        scales = part(fact, "scales")
        times, away = number(scales, "ratio", 1.0), number(scales, "shift")
        at = next((p.at for p in window.facts("phase") if p.get("kind") == "validation" and p.at is not None), None)
        if not scales or at is None or (1 / ratio < times < ratio and away < shift) or not worse(window, 1.5):
            continue
        return Finding(
            "val-preprocessing-mismatch", "measured", "harmful", f"Columns of the validation rows spread {times:.2g} times as wide as those of training and lie {away:.2g} deviations away",
            "Apply the same preprocessing to validation as to training (same transform, constants fitted on training rows).", Where.at(named_line(window, fact, at), also=(str(at),)),
            evidence=(Evidence(f"medians over {int(number(scales, 'columns'))} columns, {int(number(fact.data, 'train_rows'))} training and {int(number(scales, 'rows'))} validation rows",
                               "experiment/table", times, ratio, int(number(scales, "rows"))),), treatment="normalise-inputs", explains=("splits-apart",))
    return None


def named_line(window: Window, fact: Fact, at: Location) -> Location:
    """Where the table of the validation side was made."""
    name = str((fact.get("between") or ["", ""])[-1])
    found = origin(window, at, name) if name else None
    return Location(at.file, found.lineno) if found is not None else prepared(window, at)
