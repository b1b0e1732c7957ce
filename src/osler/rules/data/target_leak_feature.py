from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.lineage_values import FEATURE, LABEL, named_labels, pairs
from osler.rules.rows_compared import UNSEEN, number, part, tables
from osler.rules.script import call_name, calls, parse, root, targets
from osler.rules.target_parts import parts_of_target

EXACT = ("code", "copy", "monotone", "threshold", "present")
SAYS = {"code": "has one value for each class", "copy": "is the target up to scale", "monotone": "rises and falls with the target without exception",
        "threshold": "separates the classes by one cut", "present": "is filled in for one class only", "strong": "nearly is the target"}
JOINS = ("column_stack", "hstack", "concatenate", "cat", "concat", "c_", "stack", "append", "insert", "assign", "DataFrame", "extend")
DRAWS = ("randint", "randrange", "integers", "bernoulli")
FIX = "Leave out what is known only with, or after, the outcome."


@rule("target-leak-feature", "data")
def check(window: Window, *, area: float = 0.985, strong: float = 0.99, rest: float = 0.9, without: float = 0.92) -> Iterator[Finding | NotChecked]:
    """An input says what the target is.

    **What it is.** A column that is computed from the target, recorded after the outcome, or the target itself (a slice that is off by one, a frame
    whose target column was not dropped); a window of a series that reaches up to the value it shall predict.

    **How it is seen.** Inputs and targets of the training rows are compared. One column alone decides the target (a copy, one value for each class, filled in for one class
    only, an area under the curve above `area` or a correlation above `strong`), while the next best column stays below `rest` and a linear model without it below
    `without`; and the script does not compute the target from that input. Or the target is a plain sum of columns that a choice of features by exclusion leaves in. Or a real-valued target stands in its own input window, number for number.

    **Why it matters.** The model learns to copy; where it is used the column is missing or empty.

    **What to do.** Leave the column out; let the window end before its target.

    **When this is wrong.** Made-up data whose target is a function of one input column (recognised where the script computes the target from the
    inputs), auto-encoders and language models (targets as wide as the input are left alone), a feature that rightly is that good.

    **Source.** Handbook A §22 (features known only after the event); Kaufman et al. 2012, "Leakage in data mining". Thresholds from simulated tables.
    """
    seen = tables(window)
    for fact in seen:
        found = part(fact, "window_target")
        if found and not intended(window):
            yield Finding(
                "target-leak-feature", "measured", "harmful", "The target stands in its own input", "Let the input end before the first value that is predicted.",
                Where.at((channel_line(window) if found.get("each_step") else None) or window_line(window)), evidence=(Evidence(
                    f"{int(number(found, 'found'))} of {int(number(found, 'targets'))} target values of a row are number {found.get('places')} of the {int(number(found, 'columns'))} input values, in every row",
                    "experiment/table", number(found, "found"), 0.0, int(number(fact.data, "train_rows"))),))
            return
    for fact in seen:
        c = part(fact, "column")
        kind, score, second = str(c.get("kind")), number(c, "score"), number(c, "second", 1.0)
        binary = c.get("measure") == "area under the curve"
        limit = area if binary else strong
        others = number(c, "without", 0.0)
        decides = (kind in EXACT and (second < 0.95 or kind in ("copy", "code"))) or (score > limit and second < rest)
        if not c or number(c, "columns") < 3 or not decides or others > without or (c.get("classes") and number(c, "classes") > 20) or intended(window):
            continue
        at, why = column_line(window, fact)
        if why == "" and kind not in ("copy", "code", "present"):
            continue
        name = f"Column {c['label']!r}" if c.get("label") else f"Input column {c['index']}"
        yield Finding(
            "target-leak-feature", "measured", "harmful", f"{name} {SAYS.get(kind, SAYS['strong'])}", FIX, Where.at(at, columns=(str(c["label"]),) if c.get("label") else ()),
            evidence=(Evidence(f"{c['measure']} of that column alone {score:.3f}, of the next best {second:.3f}; " + (f"a linear model without it reaches {others:.2f}" if others else "")
                               + (f"; {why}" if why else ""), "experiment/table", score, limit, int(number(c, "rows"))),))
        return
    late = rolled_target(window) or parts_of_target(window)
    if late is not None:
        yield late
    elif not seen:
        yield NotChecked("target-leak-feature", UNSEEN)


def label_words(module: ast.Module) -> tuple[set[str], set[str]]:
    """Names and columns that stand for the target."""
    names, columns = named_labels(module)
    names |= {t.removeprefix("self.") for n in ast.walk(module) if isinstance(n, ast.Assign) for t in targets(n) if LABEL.match(t)}
    names |= {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and LABEL.match(n.id)}
    return names, columns


def mentions(node: ast.AST, names: set[str], columns: set[str]) -> bool:
    """Whether a target is among the values an expression is made of (not merely an index into others)."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr in columns or (node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "self") or mentions(node.value, names, columns)
    if isinstance(node, ast.Subscript):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            return node.slice.value in columns
        return mentions(node.value, names, columns)
    if isinstance(node, ast.Call) and call_name(node) in ("len", "range", "zeros_like", "size", "randn_like", "unique"):
        return False
    return any(mentions(n, names, columns) for n in ast.iter_child_nodes(node))


def intended(window: Window) -> bool:
    """The target is computed from the inputs by the script: ``y = (x[:, 0] > 0)``, ``y = f(x)``, and nothing of it is put back into them."""
    for text in window.sources.values():
        module = parse(text)
        if module is None:
            continue
        if drawn_target(module):
            return True
        names, columns = label_words(module)
        back = bool(putting_back(module, names, columns))
        for node in ast.walk(module):
            for goal, value in pairs(node) if not back else ():
                if (root(goal) or "").removeprefix("self.") in names:
                    loose = {n.id for n in ast.walk(value) if isinstance(n, ast.Name) and FEATURE.match(n.id) and re.match(r"^[xX]", n.id)}
                    if loose and not windows_series(value):
                        return True
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2 and not back and isinstance(node.value.elts[0], ast.Name):
                x = node.value.elts[0].id
                if any(isinstance(n, ast.Name) and n.id == x for n in ast.walk(node.value.elts[1])):
                    return True
    return False


def drawn_target(module: ast.Module) -> bool:
    """A task of recall: the target is drawn at random and written into the input, ``c = randint(...)``, ``x[:, 0] = c``."""
    for scope in (module, *(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef))):
        drawn = {t for s in ast.walk(scope) if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and call_name(s.value) in DRAWS for t in targets(s)}
        if any(isinstance(s, ast.Assign) and isinstance(s.value, ast.Name) and s.value.id in drawn and any(isinstance(t, ast.Subscript) and root(t) != s.value.id for t in s.targets)
               for s in ast.walk(scope)):
            return True
    return False


def windows_series(node: ast.AST) -> bool:
    """A moving place in a series: ``x[i + width]``."""
    return any(isinstance(n, ast.Subscript) and not isinstance(n.slice, ast.Tuple | ast.Constant) and any(isinstance(m, ast.BinOp) for m in ast.walk(n.slice)) for n in ast.walk(node))


def putting_back(module: ast.Module, names: set[str], columns: set[str]) -> list[ast.stmt]:
    """Statements that put something made from the target into the features."""
    found: list[ast.stmt] = []
    taint = set(names)
    cols = set(columns)
    statements = sorted((n for n in ast.walk(module) if isinstance(n, ast.Assign | ast.AugAssign | ast.Expr)), key=lambda s: s.lineno)
    for statement in statements:
        value = statement.value
        if isinstance(statement, ast.Expr):
            if isinstance(value, ast.Call) and call_name(value) in ("append", "insert") and value.args and isinstance(value.args[-1], ast.List | ast.Tuple | ast.Dict) \
                    and mentions(value.args[-1], taint, cols) and FEATURE.match(root(value.func) or ""):
                found.append(statement)
            continue
        goals = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for goal in goals:
            name = root(goal) or ""
            made = mentions(value, taint, cols)
            if isinstance(goal, ast.Subscript):
                column = goal.slice.value if isinstance(goal.slice, ast.Constant) else None
                if made and not (isinstance(column, str) and column in columns) and name.removeprefix("self.") not in names:
                    found.append(statement)
                    if isinstance(column, str):
                        cols.add(column)
            elif isinstance(goal, ast.Name) and made and name not in names:
                joined = any(call_name(c) in JOINS for c in calls(value)) or any(isinstance(n, ast.Attribute) and n.attr in ("c_", "r_") for n in ast.walk(value)) or isinstance(value, ast.Dict)
                if joined:
                    found.append(statement)
                elif not FEATURE.match(name):
                    taint.add(name)
    return found


def column_line(window: Window, fact: Fact) -> tuple[Location | None, str]:
    """The line to change and what it shows; an empty text when the script says nothing of the column."""
    label = part(fact, "column").get("label")
    for file, text in window.sources.items():
        module = parse(text)
        if module is None:
            continue
        if label:
            lists = [n for n in ast.walk(module) if isinstance(n, ast.List | ast.Tuple) and len(n.elts) > 1 and any(isinstance(e, ast.Constant) and e.value == label for e in n.elts)]
            if lists:
                item = next(e for e in lists[-1].elts if isinstance(e, ast.Constant) and e.value == label)
                return Location(file, item.lineno), f"{label!r} is in the list of features at line {item.lineno}"
        names, columns = label_words(module)
        back = putting_back(module, names, columns)
        if back:
            joined = [s for s in back if not isinstance(s, ast.Assign) or any(call_name(c) in JOINS for c in calls(s.value))] or back
            line = joined[-1].lineno
            return Location(file, line), f"line {line} puts something made from the target into the inputs"
        sliced = [n for n in ast.walk(module) if isinstance(n, ast.Assign) and any(FEATURE.match(t) for t in targets(n)) and any(isinstance(s, ast.Subscript) for s in ast.walk(n.value))
                  and any(LABEL.match(t) for m in ast.walk(module) if isinstance(m, ast.Assign) and abs(m.lineno - n.lineno) <= 3 for t in targets(m))]
        if sliced:
            return Location(file, sliced[-1].lineno), f"line {sliced[-1].lineno} takes the inputs"
        frames = [*calls(module, "to_numpy", "drop", "select_dtypes")] + [n for n in ast.walk(module) if isinstance(n, ast.Attribute) and n.attr == "values"]
        if frames:
            return Location(file, frames[0].lineno), f"line {frames[0].lineno} takes the inputs from a frame"
    return None, ""


def channel_line(window: Window) -> Location | None:
    """The statement that puts the target among the channels."""
    for file, text in window.sources.items():
        module = parse(text)
        if module is None:
            continue
        names, columns = label_words(module)
        names |= {made for n in ast.walk(module) for goal, value in pairs(n) if LABEL.match(root(goal) or "") and (made := root(value)) and not FEATURE.match(made)}
        if back := putting_back(module, names, columns):
            return Location(file, back[-1].lineno)
    return None


ROLLS = ("rolling", "ewm", "expanding", "diff", "pct_change", "cumsum")


def rolled_target(window: Window) -> Finding | None:
    """A rolling figure of the target column that includes the row's own target."""
    for file, text in window.sources.items():
        module = parse(text)
        if module is None or not re.search(r"\.(rolling|ewm|expanding|diff|pct_change|cumsum)\(", text):
            continue
        now = {n.value for s in ast.walk(module) if isinstance(s, ast.Assign) and any(LABEL.match(t) or (t.isupper() and "TARGET" in t) for t in targets(s))
               and not any(call_name(c) in ("shift", "where") for c in calls(s.value)) and not any(isinstance(c, ast.Compare | ast.Slice) for c in ast.walk(s.value))
               for n in ast.walk(s.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        for s in ast.walk(module):
            if not isinstance(s, ast.Assign) or not isinstance(s.targets[0], ast.Subscript) or not isinstance(s.targets[0].slice, ast.Constant):
                continue
            column = s.targets[0].slice.value
            inside = {n.value for n in ast.walk(s.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)} | {n.attr for n in ast.walk(s.value) if isinstance(n, ast.Attribute)}
            own = inside & now - {column}
            if own and isinstance(column, str) and column not in now and any(call_name(c) in ROLLS for c in calls(s.value)) and not any(call_name(c) == "shift" for c in calls(s.value)) \
                    and not re.search(r"shift\(\s*-", text) and text.count(repr(column)) + text.count(f'"{column}"') > 0:
                name = sorted(own)[0]
                return Finding("target-leak-feature", "certain", "harmful", f"The feature {column!r} is rolled over the target {name!r} up to the row itself", f"Shift {name!r} by one row before rolling.",
                               Where.at(Location(file, s.lineno), columns=(str(column),)),
                               evidence=(Evidence(f"{ast.unparse(s)[:110]}: the target of the row is in it", "source", None, None, 1),))
    return None


def window_line(window: Window) -> Location | None:
    """Where input windows are cut: the slice with a moving end in the place that also takes the target."""
    best: Location | None = None
    for file, text in window.sources.items():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Subscript)] if isinstance(node, ast.Assign | ast.Return | ast.Expr) else []
            for cut in inner:
                index = cut.slice.elts[0] if isinstance(cut.slice, ast.Tuple) and cut.slice.elts else cut.slice
                if isinstance(index, ast.Slice) and index.lower is not None and index.upper is not None and any(isinstance(n, ast.BinOp) for n in ast.walk(index.upper)):
                    return Location(file, cut.lineno)
        if module is not None and best is None:
            made = next((c for c in calls(module, "unfold", "sliding_window_view")), None)
            at = next((n for n in ast.walk(module) if isinstance(n, ast.Assign) and any(FEATURE.match(t) for t in targets(n)) and any(isinstance(s, ast.Subscript) for s in ast.walk(n.value))), None)
            best = Location(file, made.lineno) if made is not None else Location(file, at.lineno) if at is not None else None
    return best
