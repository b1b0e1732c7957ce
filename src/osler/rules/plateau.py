"""``ReduceLROnPlateau``: which way its metric goes, and whether it cuts the rate while training still improves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding
from osler.core.window import Window
from osler.rules.curve import curve
from osler.rules.schedule_calls import say
from osler.rules.schedules import Rhythm, Schedule
from osler.rules.script import assignment, call_name, function_named, tree
from osler.rules.values import argument, call_at, decided

LOWER = re.compile(r"(^|_)(.*loss.*|err|error|errors|mse|mae|rmse|nll|ce|bce|ppl|perplexity|bpc|bits|wer|cer|fid|nelbo|energy|cost|objective|distance)(_|\d|$)", re.I)
HIGHER = re.compile(r"(^|_)(acc.*|accuracy|f1|auc|auroc|auprc|ap|map|iou|miou|dice|jaccard|r2|reward|rewards|return|returns|psnr|ssim|bleu|rouge|precision|recall|"
                    r"correct|hits|mrr|ndcg|kappa|mcc|elbo|likelihood|loglik|top1|corr|spearman|pearson)(_|\d|$)", re.I)
LOSSES = re.compile(r"loss|cross_entropy|mse|nll|criterion|huber|kl_div", re.I)
RIGHT = re.compile(r"accuracy|f1_score|roc_auc|r2_score|argmax|correct|average_precision", re.I)


def direction(window: Window, at: Location | None) -> str | None:
    """Whether the metric handed over at a line is to be made ``lower`` or ``higher``, by its name and by what computes it."""
    call = call_at(window, at, "step")
    value = argument(call, "metrics", 0)
    return read(window, at, value) if value is not None and at is not None else None


def monitored(window: Window) -> str | None:
    """The metric a framework hands over, by the name in its configuration."""
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            pairs = zip(n.keys, n.values, strict=True) if isinstance(n, ast.Dict) else ()
            for key, value in pairs:
                if isinstance(key, ast.Constant) and key.value == "monitor" and isinstance(value, ast.Constant):
                    return named(str(value.value))
    return None


def read(window: Window, at: Location, value: ast.expr, depth: int = 4) -> str | None:
    if depth <= 0:
        return None
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        return {"lower": "higher", "higher": "lower"}.get(read(window, at, value.operand, depth) or "")
    if isinstance(value, ast.BinOp):
        if isinstance(value.op, ast.Sub) and isinstance(value.left, ast.Constant):
            return {"lower": "higher", "higher": "lower"}.get(read(window, at, value.right, depth) or "")
        return read(window, at, value.left, depth) or read(window, at, value.right, depth)
    if isinstance(value, ast.Subscript):
        key = value.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            return named(key.value)
        return read(window, at, value.value, depth)
    if isinstance(value, ast.Attribute):
        return named(value.attr) or read(window, at, value.value, depth)
    if isinstance(value, ast.Name):
        return named(value.id) or _bound(window, at, value.id, depth)
    if isinstance(value, ast.Call):
        name = call_name(value)
        function = function_named(window, at.file, name)
        if function is not None:
            return named(name) or returned(window, at, function, None, depth)
        if RIGHT.search(name):
            return "higher"
        if LOSSES.search(name) or named(name) == "lower":
            return "lower"
        inner = value.func.value if isinstance(value.func, ast.Attribute) else None
        for part in (*value.args, *([inner] if inner is not None else [])):
            found = read(window, at, part, depth - 1)
            if found is not None:
                return found
    if isinstance(value, ast.Compare):
        return "higher"
    return None


def named(name: str) -> str | None:
    if re.search(r"^neg_|_neg$|minus", name, re.I):
        return None
    if re.search(r"^(1_?minus_)", name):
        return None
    low, high = bool(LOWER.search(name)), bool(HIGHER.search(name))
    return None if low == high else "lower" if low else "higher"


def _bound(window: Window, at: Location, name: str, depth: int) -> str | None:
    found = assignment(window, at.file, name, at.line)
    value = getattr(found, "value", None)
    if isinstance(found, ast.Assign) and isinstance(found.targets[0], ast.Tuple) and isinstance(value, ast.expr):
        names = [t.id if isinstance(t, ast.Name) else "" for t in found.targets[0].elts]
        index = names.index(name) if name in names else None
        if isinstance(value, ast.Tuple) and index is not None and index < len(value.elts):
            return read(window, at, value.elts[index], depth - 1)
        function = function_named(window, at.file, call_name(value)) if isinstance(value, ast.Call) else None
        return returned(window, at, function, index, depth) if function is not None else None
    if isinstance(found, ast.AugAssign):
        return read(window, Location(at.file, found.lineno), found.value, depth - 1)
    if isinstance(found, ast.Assign | ast.AnnAssign) and isinstance(value, ast.expr) and not isinstance(value, ast.Constant):
        return read(window, Location(at.file, found.lineno), value, depth - 1)
    return None


def returned(window: Window, at: Location, function: ast.AST, index: int | None, depth: int) -> str | None:
    """What a function of the user's hands back: by the names in its return statements."""
    for n in ast.walk(function):
        if isinstance(n, ast.Return) and n.value is not None:
            value = n.value
            if index is not None and isinstance(value, ast.Tuple) and index < len(value.elts):
                value = value.elts[index]
            found = read(window, Location(at.file, n.lineno), value, depth - 1)
            if found is not None:
                return found
    return None


def cuts(s: Schedule) -> npt.NDArray[np.int64]:
    """Calls after which the rate was lower by the scheduler's factor."""
    lr, factor = s.marks[:, 1], float(s.attrs.get("factor") or 0.1)
    ratio = lr[1:] / np.maximum(lr[:-1], 1e-300)
    return np.flatnonzero(np.isclose(ratio, factor, rtol=0.05)) + 1


def metric_checks(window: Window, s: Schedule, pace: Rhythm | None) -> Iterator[Finding]:
    """Mode against metric, metrics that never change, cuts while the metric improves, cuts every few batches."""
    if not s.fact.get("metric") or s.calls < 3:
        return
    metric, lr, mode = s.marks[:, 2], s.marks[:, 1], str(s.attrs.get("mode"))
    seen = metric[np.isfinite(metric)]
    cut = cuts(s)
    if len(seen) < 3 or len(seen) < len(metric):
        return
    wanted = monitored(window) if s.framework else direction(window, s.step_at)
    where = _mode_line(window, s)
    if wanted is None:
        wanted = by_numbers(window, s, seen)
    if wanted is not None and (wanted == "lower") != (mode == "min"):
        better = (seen < np.minimum.accumulate(np.r_[np.inf, seen[:-1]])) if wanted == "lower" else (seen > np.maximum.accumulate(np.r_[-np.inf, seen[:-1]]))
        if len(cut) or (len(seen) >= 5 and better[1:].mean() >= 0.5):
            yield say(f'ReduceLROnPlateau(mode="{mode}") is given a metric that should get {wanted}',
                      f'Set mode="{"min" if mode == "max" else "max"}", or pass the other metric.', where,
                      [Evidence(f"the metric went from {seen[0]:.4g} to {seen[-1]:.4g} and the rate was cut {len(cut)} times, to {lr[-1]:.3g}", "steps/lr", lr[-1], lr[0], len(seen)),
                       Evidence(f"{int(better[1:].sum())} of {len(better) - 1} values were better than all before", None, float(better[1:].mean()), None, len(seen))],
                      certainty="measured", also=(s.step_at,))
            return
    line = curve(window)
    if len(seen) >= 6 and len(cut) >= 2 and np.all(seen == seen[0]) and line is not None and line.one_sign and line.fall > 0.2 and not 0.95 <= seen[0] <= 1:
        yield say(f"ReduceLROnPlateau is given the same value {seen[0]:.4g} at every call", "Pass the metric of the current epoch.", s.step_at,
                  [Evidence(f"{len(seen)} calls, {len(cut)} cuts, while the training loss fell by {line.fall:.0%}", "steps/lr", lr[-1], lr[0], len(seen))], also=(s.at,))
        return
    patience = int(s.attrs.get("patience") or 0)
    per_batch = s.steps >= 50 and s.calls >= 0.6 * s.steps and pace is not None and pace.epochs >= 2
    if per_batch and pace is not None and patience < s.steps / pace.epochs and lr[-1] <= 0.02 * max(lr[0], s.base):
        yield say(f"ReduceLROnPlateau is stepped once per batch with a patience of {patience}: the rate fell to {lr[-1]:.3g}",
                  "Call scheduler.step(metric) once per epoch, with the epoch's mean.", s.step_at,
                  [Evidence(f"{s.calls} calls in {s.steps} steps; {len(cut)} cuts seen", "steps/lr", lr[-1], lr[0], s.calls)], treatment="schedule-per-epoch", also=(s.at,))
        return
    yield from _improving(window, s, seen, cut, where)


def _improving(window: Window, s: Schedule, seen: npt.NDArray[np.float64], cut: npt.NDArray[np.int64], where: Location | None) -> Iterator[Finding]:
    """The rate is cut although the metric gets better from call to call: the threshold does not see it."""
    sign = -1.0 if str(s.attrs.get("mode")) == "min" else 1.0
    patience, at, good = int(s.attrs.get("patience") or 0), 0, 0
    for c in cut:
        part = seen[max(at, c - patience - 1):c + 1]
        at = c
        gain = sign * (part[-1] - part[0]) / max(abs(part[0]), 1e-12)
        good += bool(len(part) >= 3 and gain > 0.03 and (sign * np.diff(part) > 0).mean() >= 0.7)
    if len(cut) >= 2 and good >= 0.6 * len(cut) and good >= 2:
        yield say(f"ReduceLROnPlateau cut the rate {len(cut)} times while its metric was improving", f"Lower the threshold ({s.attrs.get('threshold')}, "
                  f"{s.attrs.get('threshold_mode')}), so that such progress counts.", where,
                  [Evidence(f"before {good} of {len(cut)} cuts the metric had improved by more than 3 % within the patience", "steps/lr", good, 0.6 * len(cut), len(seen))],
                  certainty="measured", also=(s.step_at,))


def by_numbers(window: Window, s: Schedule, seen: npt.NDArray[np.float64]) -> str | None:
    """The metric equals a loss that was computed at that moment."""
    values = window.calls
    values = values[(values["phase"] == 1) & np.isfinite(values["value"])]
    if not len(values) or len(seen) < 5:
        return None
    steps = s.marks[:, 0]
    hits = 0
    for step, value in zip(steps, seen, strict=True):
        here = values[values["step"] == step]["value"].astype(float)
        hits += bool(len(here) and min(abs(float(here.mean()) - value), float(np.abs(here - value).min())) <= 1e-3 * max(abs(value), 1e-9))
    return "lower" if hits >= 0.7 * len(seen) else None


def _mode_line(window: Window, s: Schedule) -> Location | None:
    if s.at is None:
        return None
    call = call_at(window, s.at, s.kind)
    mode = argument(call, "mode", 1)
    return decided(window, s.at, mode) if mode is not None and call is not None else s.at


