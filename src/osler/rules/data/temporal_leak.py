from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.lineage_values import LABEL
from osler.rules.rows_compared import UNSEEN, number, part, tables
from osler.rules.script import call_name, calls, parse, root, targets, words
from osler.rules.splits import Site, drawn_split, says_time, sites

FIX = "Divide by time first, leave a gap of one window between the sides, and cut the windows afterwards."


@rule("temporal-leak", "data")
def check(window: Window, *, windows: float = 0.3, between: float = 0.3, alike: float = 0.6, decay: float = 1.15) -> Iterator[Finding | NotChecked]:
    """Training knows the time around, or after, the moments it is judged on.

    **What it is.** A random split of a time series or of its overlapping windows, a shuffle before the split, training rows that come
    after the validation rows, or a feature that looks ahead (centred rolling mean, negative shift, two-sided filter).

    **How it is seen.** The rows of both sides are compared. A share `windows` of the validation rows holds the same numbers as a
    training row, moved by some steps, and chance drew the split. Or the original order of the rows is known: the share `between` of the validation
    rows has training rows right before and after it, rows next to each other are alike (median distance below `alike` of that of random rows), the more so the nearer
    (by `decay` from 1 to 20 places), and the script speaks of time; rows that are as near at five places as at one, and no nearer than chance
    further on, are entities and no series. Columns that hold earlier rows' values (`shift(1)`) with a random division, and a look ahead, are read in the script.

    **Why it matters.** Between two known neighbours a value can be interpolated; the future cannot.

    **What to do.** Split by time with a gap; compute features from the past only.

    **When this is wrong.** Windows of whole numbers (tokens) meet in texts that repeat themselves: a note. A curve fitted over its own axis (a grid of one or two columns) is interpolation by design and is left alone; a shifted
    *target* is legitimate (the handbook's audit for `shift(-1)` must not count it).

    **Source.** Handbook A §22 (time); scikit-learn `TimeSeriesSplit`. Thresholds from simulated series and tables.
    """
    seen = tables(window)
    site = drawn_split(window)
    ahead = looks_ahead(window)
    for fact in seen:
        moved, order = part(fact, "shifted"), part(fact, "order")
        mixed = site is not None or number(order, "between") > between
        if number(moved, "share") > windows and mixed:
            at = place(window, site)
            yield Finding(
                "temporal-leak", "measured", "note" if moved.get("whole") else "harmful", f"{number(moved, 'share'):.0%} of the validation windows overlap with training windows", FIX, Where.at(at),
                evidence=(Evidence(f"in {number(moved, 'share'):.0%} of {int(number(moved, 'rows'))} validation rows {int(number(moved, 'block'))} numbers in a row are those of a training row at another place",
                                   "experiment/table", number(moved, "share"), windows, int(number(moved, "rows"))),))
            return
    words_of_time = says_time(window)
    for fact in seen:
        order = part(fact, "order")
        lags: dict[str, Any] = order.get("lags") or {}
        near, far = number(lags, "1", 1.0), number(lags, "20", number(lags, "5", 1.0))
        width = 1
        for size in fact.get("shape") or ():
            width *= int(size)
        grid = number(order, "monotone") > 0.99 and width <= 3
        steps = number(lags, "5", far) < near * 1.1 and far > 0.9  # alike up to the end of a block and not beyond: entities, not time
        smooth = near < alike and far > near * decay and not grid and not steps
        if smooth and words_of_time and number(order, "between") > between and site is not None:
            yield Finding(
                "temporal-leak", "measured", "harmful", f"{number(order, 'between'):.0%} of the validation rows lie between training rows of a series", FIX, Where.at(place(window, site)),
                evidence=(Evidence(f"rows next to each other are {1 / max(near, 1e-3):.1f} times as near as random ones, rows 20 apart {1 / max(far, 1e-3):.1f} times; line {site.at.line} draws rows at random",
                                   "experiment/table", near, alike, int(number(order, "rows"))),))
            return
        if smooth and len(words_of_time) >= 2 and number(order, "ahead") > 0.9:
            cut = next(iter(sites(window)), None)
            yield Finding(
                "temporal-leak", "measured", "harmful", "The validation rows come before the training rows in time", "Train on the past and validate on what follows.",
                Where.at(Location(cut.file, cut.line) if cut is not None else None),
                evidence=(Evidence(f"{number(order, 'ahead'):.0%} of the validation rows stand before the first training row of a series", "experiment/table", number(order, "ahead"), 0.9,
                                   int(number(order, "rows"))),))
            return
    if ahead is not None:
        yield ahead
        return
    lagged = lag_columns(window)
    if lagged is not None and site is not None and not site.in_epochs:
        yield Finding(
            "temporal-leak", "certain", "harmful", "Rows with lags of a series are divided at random", FIX, Where.at(site.at, also=(str(lagged),)),
            evidence=(Evidence(f"line {lagged.line} gives each row values of the rows before it; line {site.at.line} draws rows at random", "source", None, None, 1),))
    elif not seen:
        yield NotChecked("temporal-leak", UNSEEN)


def lag_columns(window: Window) -> Location | None:
    """A column that holds an earlier row's value: ``frame["lag1"] = frame["load"].shift(1)``. Not within groups (a panel of short histories)."""
    for file, text in window.sources.items():
        module = parse(text)
        counters = {n.target.id for n in ast.walk(module) if isinstance(n, ast.For) and isinstance(n.target, ast.Name) and steps_over(n.iter)} if module is not None else set()
        for statement in ast.walk(module) if module is not None else ():
            if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Subscript) or not isinstance(statement.targets[0].slice, ast.Constant | ast.JoinedStr | ast.BinOp | ast.Call):
                continue
            for call in calls(statement.value, "shift"):
                by = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "periods"), ast.Constant(1))
                back = (isinstance(by, ast.Constant) and isinstance(by.value, int) and by.value > 0) or (isinstance(by, ast.Name) and by.id in counters)
                if isinstance(call.func, ast.Attribute) and back and not any(call_name(c) == "groupby" for c in calls(statement.value)):
                    return Location(file, call.lineno)
    return None


def steps_over(node: ast.expr) -> bool:
    """Whole numbers that a loop runs over: ``range(…)``, ``(1, 7, 14)``, a list of lags by name."""
    return (isinstance(node, ast.Call) and call_name(node) == "range") or (isinstance(node, ast.Tuple | ast.List) and all(isinstance(e, ast.Constant) and isinstance(e.value, int) for e in node.elts)) \
        or any(re.search(r"lag|shift|horizon|step", w, re.I) for w in words(node))


def place(window: Window, site: Site | None) -> Location | None:
    """The draw, where it is near the cut; else the cut."""
    if site is not None:
        return site.at
    found = sites(window)
    return Location(found[0].file, found[0].line) if found else None


def looks_ahead(window: Window) -> Finding | None:
    """A feature computed from later rows: negative shift, centred rolling window, two-sided filter of a series that is forecast."""
    for file, text in window.sources.items():
        module = parse(text)
        for statement in ast.walk(module) if module is not None else ():
            if not isinstance(statement, ast.Assign | ast.AugAssign):
                continue
            goal = named(statement)
            if any(LABEL.match(n) or re.search(r"target|label|next|future|ahead|y\b|forward|horizon|return", n, re.I) for n in goal):
                continue
            for call in calls(statement.value):
                name, why = call_name(call), None
                first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg in ("periods", "shifts")), None)
                if name == "shift" and isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.USub) and isinstance(first.operand, ast.Constant):
                    why = f"{ast.unparse(call)[-40:]} takes values of later rows"
                elif name == "rolling" and any(k.arg == "center" and getattr(k.value, "value", None) is True for k in call.keywords):
                    why = "a centred rolling window takes in later rows"
                if why is not None:
                    return Finding("temporal-leak", "certain", "harmful", f"The feature {', '.join(sorted(goal)) or 'here'} looks ahead", "Compute features from rows up to the present one only.",
                                   Where.at(Location(file, call.lineno)), evidence=(Evidence(why, "source", None, None, 1),))
    return two_sided(window)


def two_sided(window: Window) -> Finding | None:
    """The whole series is smoothed in both directions, and later values of it are the target."""
    for file, text in window.sources.items():
        module = parse(text)
        if module is None:
            continue
        spoken = words(module)
        forecast = any(re.search(r"forecast|horizon|lookback|n_lags|lags$|^lag|future|predict_ahead|ahead", w, re.I) for w in spoken)
        for statement in ast.walk(module) if forecast else ():
            if not isinstance(statement, ast.Assign):
                continue
            for call in calls(statement.value, "convolve", "savgol_filter", "filtfilt", "sosfiltfilt", "gaussian_filter1d", "uniform_filter1d", "medfilt", "avg_pool1d"):
                name = call_name(call)
                given = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
                last = getattr(call.args[-1], "value", None) if call.args else None
                both = name not in ("convolve", "avg_pool1d") or "same" in (last, given.get("mode")) or (name == "avg_pool1d" and "padding" in given)
                if both and not any(LABEL.match(t) for t in targets(statement)):
                    return Finding("temporal-leak", "suspected", "harmful", f"{name} smooths the series with values from both sides of each moment", "Use a filter that looks back only.",
                                   Where.at(Location(file, call.lineno)), evidence=(Evidence(f"{ast.unparse(call)[:100]} before later values are predicted from it", "source", None, None, 1),))
    return None


def named(statement: ast.Assign | ast.AugAssign) -> set[str]:
    """What a statement assigns, columns of frames by their name."""
    found: set[str] = set()
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
            found.add(target.slice.value)
        elif (name := root(target)) is not None:
            found.add(name)
    return found
