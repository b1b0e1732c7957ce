from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.script import FUNCTIONS, LOOPS, call_name, calls, constant, targets, tree, words

LOWER = re.compile(r"(^|_)(loss\w*|err|error|mse|rmse|mae|nll|ppl|perplexity|vl|vloss|deviance)($|_|\d)", re.I)
HIGHER = re.compile(r"(^|_)(acc|accuracy|auc|auroc|f1|iou|miou|map|dice|r2|ndcg|bleu|recall|precision|hits?|psnr|ssim)($|_|\d)", re.I)
BEST = re.compile(r"best|min_|max_|lowest|highest|record", re.I)
TRAINING = re.compile(r"(^|_)(tr|trn|train|training|running)($|_)", re.I)
VALIDATING = re.compile(r"(^|_)(v|va|val|valid|validation|dev|test|vl|eval)($|_|loss|acc)", re.I)


@rule("early-stop-misconfigured", "evaluation")
def check(window: Window, *, still_falling: float = 0.1, hasty: int = 3) -> Iterator[Finding]:
    """Early stopping or best-checkpoint selection follows the wrong direction, metric or patience.

    **What it is.** The branch that keeps the "best" model takes larger losses (or smaller accuracies) for better, starts from
    a value that nothing can beat, keeps a reference instead of a copy, counts bad epochs without ever starting anew, or
    gives up while validation still improves.

    **How it is seen.** In the text of the script: the comparison of a metric with its best value whose branch assigns that
    value, also in the method of a class that is handed the figure; `mode` and `monitor` of a callback or such a class; the counter that is compared with the patience. Patience itself is judged by
    the validation losses: the run ended before its last epoch with a patience of `hasty` or less while the loss had just
    fallen by `still_falling` (with a patience of one the epoch that ended it is left out).

    **Why it matters.** The worst or an arbitrary model is kept, or training ends after a few epochs.

    **What to do.** Lower is better for losses, higher for accuracies; copy the state; reset the counter at each improvement.

    **When this is wrong.** A variable called "loss" that holds a gain.

    **Source.** Handbook A §17 (patience); PyTorch forum threads on `state_dict` references.
    """
    for file in {f.at.file for f in window.all_facts if f.at is not None}:
        module = tree(window, file)
        if module is None:
            continue
        found = [x for x in (*branches(window, file, module), *callbacks(file, module), *stoppers(module), *hasty_stop(window, file, module, still_falling, hasty)) if x]
        for line, certainty, severity, title, fix, evidence in found[:1]:
            yield Finding("early-stop-misconfigured", certainty, severity, title, fix, Where.at(Location(file, line)), evidence=(evidence,))


Claim = tuple[int, str, str, str, str, Evidence]


def branches(window: Window, file: str, module: ast.Module) -> Iterator[Claim]:
    """The ``if metric < best: best = metric`` of the script, checked for direction, start value, copies and counter."""
    methods = [f for n in ast.walk(module) if isinstance(n, ast.ClassDef) for f in n.body if isinstance(f, FUNCTIONS)]
    for loop in (*(n for n in ast.walk(module) if isinstance(n, LOOPS)), *methods):  # a method is called once an epoch and keeps the best in ``self``
        for test in (n for n in ast.walk(loop) if isinstance(n, ast.If)):
            pair = improvement(test)
            if pair is None or (loop in methods and f"self.{pair[1]}" not in {t for s in test.body for t in targets(s)}):
                continue
            metric, best, smaller = pair
            lower, higher = bool(LOWER.search(metric)), bool(HIGHER.search(metric))
            if lower != higher and smaller == higher:
                yield (test.lineno, "certain", "harmful", f"{metric} counts as better when it is {'smaller' if smaller else 'larger'}",
                       f"Turn the comparison round: {'lower' if lower else 'higher'} is better for {metric}.",
                       evidence(f"`{ast.unparse(test.test)}` assigns {best}"))
            first = constant(window, file, ast.Name(best), loop.lineno)
            beaten = isinstance(first, int | float) and ((smaller and first <= 0 and lower and positive(window)) or (not smaller and higher and first >= 1))
            if beaten and (not smaller or first <= 0):
                yield (start_line(module, best, loop.lineno) or test.lineno, "certain", "harmful",
                       f"{best} starts at {first}, which {metric} can never beat", f"Start {best} at {'inf' if smaller else '-inf'}.",
                       evidence(f"`{ast.unparse(test.test)}` with {best} = {first}"))
            for s in ast.walk(test):
                if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and call_name(s.value) == "state_dict" and restored(module, targets(s)):
                    yield (s.lineno, "certain", "harmful", "The best state is kept as a reference, so it changes with every later step",
                           "Copy it: copy.deepcopy(model.state_dict()).", evidence(f"`{ast.unparse(s)}`, loaded again later"))
            yield from counter(loop, test, metric)
            if TRAINING.search(metric) and any(VALIDATING.search(w) for w in words(loop)) and keeps(test):
                yield (test.lineno, "suspected", "harmful", f"The best model is chosen by {metric}, a figure of the training rows",
                       "Choose by the validation figure.", evidence(f"`{ast.unparse(test.test)}` while a validation figure exists"))


def improvement(test: ast.If) -> tuple[str, str, bool] | None:
    """(metric, best, smaller is better) of a comparison whose branch assigns the best value."""
    compare = next((n for n in ast.walk(test.test) if isinstance(n, ast.Compare) and len(n.ops) == 1), None)
    if compare is None or not isinstance(compare.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return None
    sides = [sorted(words(side)) for side in (compare.left, compare.comparators[0])]
    assigned = {t.removeprefix("self."): s for s in test.body for t in targets(s)}
    for i, side in enumerate(sides):
        best = next((w for w in side if w in assigned and BEST.search(w)), None)
        known = sorted(w for w in sides[1 - i] if best and not BEST.search(w) and w in words(assigned[best]))
        metric = next((w for w in known if LOWER.search(w) or HIGHER.search(w)), known[0] if known else None)
        if best and metric:
            less = isinstance(compare.ops[0], ast.Lt | ast.LtE)
            return metric, best, less if i == 1 else not less
    return None


def evidence(text: str) -> Evidence:
    return Evidence(text, "source", None, None, 1)


def positive(window: Window) -> bool:
    values = window.calls["value"][np.isfinite(window.calls["value"])]
    return bool(len(values) and (values > 0).all())


def start_line(module: ast.Module, name: str, before: int) -> int | None:
    return max((n.lineno for n in ast.walk(module) if isinstance(n, ast.stmt) and name in targets(n) and n.lineno < before), default=None)


def restored(module: ast.Module, names: set[str]) -> bool:
    return any(names & {ast.unparse(a) for a in c.args} for c in calls(module, "load_state_dict"))


def keeps(test: ast.If) -> bool:
    return any(call_name(c) in ("state_dict", "save", "deepcopy") for c in calls(test))


def counter(loop: ast.stmt, test: ast.If, metric: str) -> Iterator[Claim]:
    """A count of bad epochs that ends the run and is never set back."""
    for stop in (n for n in ast.walk(loop) if isinstance(n, ast.If) and any(isinstance(b, ast.Break) for b in n.body)):
        for name in words(stop.test):
            grows = any(isinstance(n, ast.AugAssign) and name in targets(n) for s in test.orelse for n in ast.walk(s))
            reset = any(isinstance(n, ast.Assign) and name in targets(n) for n in ast.walk(loop))
            if grows and not reset:
                yield (test.lineno, "certain", "harmful", f"{name} counts every epoch without improvement and is never set back",
                       f"Set {name} = 0 where {metric} improves.", evidence(f"`{ast.unparse(stop.test)}` ends the run; {name} only grows"))


def callbacks(file: str, module: ast.Module) -> Iterator[Claim]:
    """EarlyStopping and ModelCheckpoint with a mode that contradicts the monitored figure."""
    for call in calls(module):
        if not re.search(r"EarlyStop|ModelCheckpoint", call_name(call)):
            continue
        given = {str(k.arg): str(k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)}
        monitor = given.get("monitor") or next((str(a.value) for a in call.args if isinstance(a, ast.Constant)), "")
        mode = given.get("mode", "min" if "Stop" in call_name(call) and "monitor" in given else None)
        lower, higher = bool(LOWER.search(str(monitor))), bool(HIGHER.search(str(monitor)))
        if lower != higher and ((lower and mode == "max") or (higher and mode == "min")):
            yield (call.lineno, "certain", "harmful", f"{call_name(call)} watches {monitor} with mode {mode!r}",
                   f"Use mode={'min' if lower else 'max'!r} for {monitor}.", evidence(f"`{ast.unparse(call)}`"))


def setting(window: Window, file: str, module: ast.Module, node: ast.expr, before: int) -> tuple[object, int]:
    """The value of a limit and the line that sets it: a literal, a name, an entry of a table of settings, a field of one."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key: object = node.slice.value
    else:
        key = node.attr if isinstance(node, ast.Attribute) else None
    if key is None:
        made = start_line(module, node.id, before) if isinstance(node, ast.Name) else None
        return constant(window, file, node, before), made or before
    for n in ast.walk(module):
        entries = [(k.value, v) for k, v in zip(n.keys, n.values, strict=True) if isinstance(k, ast.Constant)] if isinstance(n, ast.Dict) else \
            [(k.arg, k.value) for k in n.keywords] if isinstance(n, ast.Call) and call_name(n) in ("dict", "SimpleNamespace", "Namespace") else \
            [(n.target.id, n.value)] if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) else \
            [(n.targets[0].id, n.value)] if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) else \
            [(str(n.args[0].value).lstrip("-").replace("-", "_"), next((k.value for k in n.keywords if k.arg == "default"), None))] \
            if isinstance(n, ast.Call) and call_name(n) == "add_argument" and n.args and isinstance(n.args[0], ast.Constant) else []
        for name, value in entries:
            if name == key and isinstance(value, ast.Constant):
                return value.value, value.lineno
    return None, before


def stoppers(module: ast.Module) -> Iterator[Claim]:
    """A class of the user's own that is handed the figure: by its ``mode``, or by the comparison with the best value in the method."""
    for owner in (n for n in ast.walk(module) if isinstance(n, ast.ClassDef)):
        methods = {f.name: f for f in owner.body if isinstance(f, ast.FunctionDef)}
        begin = methods.get("__init__")
        if begin is None or not re.search(r"stop|patien|best|checkpoint|saver|keeper|monitor", owner.name + " ".join(words(begin)), re.I):
            continue
        parameters = [a.arg for a in begin.args.args][1:]
        presets = dict(zip(reversed(parameters), reversed(begin.args.defaults), strict=False)) | {a.arg: d for a, d in zip(begin.args.kwonlyargs, begin.args.kw_defaults, strict=True) if d is not None}
        for made in (n for n in ast.walk(module) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and call_name(n.value) == owner.name):
            given = presets | dict(zip(parameters, made.value.args, strict=False)) | {k.arg: k.value for k in made.value.keywords if k.arg}  # type: ignore[attr-defined]
            mode = next((str(v.value) for k, v in given.items() if re.search(r"mode|direction", k) and isinstance(v, ast.Constant)), "")
            mode = mode or next(("max" if v.value == bool(re.search(r"high|great|max|larg", k)) else "min" for k, v in given.items()
                                 if re.search(r"(high|low|great|small|larg)\w*_?(is_?)?(better|best)|^(max|min)imi[sz]e$", k) and isinstance(v, ast.Constant) and isinstance(v.value, bool)), "")
            for call in calls(module):
                holder = call.func.value if isinstance(call.func, ast.Attribute) else call.func
                method = methods.get(call.func.attr if isinstance(call.func, ast.Attribute) else "__call__")
                if method is None or not call.args or not targets(made) & {ast.unparse(holder)}:
                    continue
                figure = ast.unparse(call.args[0])
                lower, higher = bool(LOWER.search(figure)), bool(HIGHER.search(figure))
                if lower == higher:
                    continue
                if mode.lower().startswith(("min", "max")):
                    if mode.lower().startswith("min") == higher:
                        yield (made.lineno, "certain", "harmful", f"{owner.name} is handed {figure} with mode {mode!r}", f"Use mode={'min' if lower else 'max'!r} for {figure}.",
                               evidence(f"`{ast.unparse(made)}` and `{ast.unparse(call)}`"))
                    continue
                inside = [f for f in methods.values() if f is method or any(isinstance(c.func, ast.Attribute) and c.func.attr == f.name for c in calls(method))]
                handed = method.args.args[1].arg if len(method.args.args) > 1 else ""
                if mode or any(isinstance(n, ast.UnaryOp | ast.Mult) for f in inside for n in ast.walk(f) if handed in words(n) or isinstance(n, ast.Mult)):
                    continue
                for test in (n for f in inside for n in ast.walk(f) if isinstance(n, ast.If)):
                    pair = improvement(test)
                    if pair is not None and pair[0] == handed and pair[2] == higher:
                        yield (test.lineno, "certain", "harmful", f"{figure} counts as better when it is {'smaller' if pair[2] else 'larger'}",
                               f"Turn the comparison round: {'lower' if lower else 'higher'} is better for {figure}.", evidence(f"`{ast.unparse(test.test)}` with {handed} = {figure} (line {call.lineno})"))


def hasty_stop(window: Window, file: str, module: ast.Module, still_falling: float, hasty: int) -> Iterator[Claim]:
    """The run broke off with a small patience while the validation loss was still falling."""
    rows = window.calls[(window.calls["phase"] == 1) & np.isfinite(window.calls["value"])]
    epochs = [float(rows["value"][rows["step"] == s].mean()) for s in np.unique(rows["step"])]
    if not window.final or len(epochs) < 3 or min(epochs) <= 0:
        return
    for loop in (n for n in ast.walk(module) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call) and call_name(n.iter) == "range"):
        planned = setting(window, file, module, loop.iter.args[-1 if len(loop.iter.args) == 1 else 1], loop.lineno)[0] if isinstance(loop.iter, ast.Call) and loop.iter.args else None
        for stop in (n for n in ast.walk(loop) if isinstance(n, ast.If) and any(isinstance(b, ast.Break) for b in n.body)):
            limit = next((c for n in ast.walk(stop.test) if isinstance(n, ast.Compare)
                          for c in [setting(window, file, module, n.comparators[0], stop.lineno)[0]] if isinstance(c, int)), None)
            line = next((where for n in ast.walk(stop.test) if isinstance(n, ast.Compare) for where in [setting(window, file, module, n.comparators[0], stop.lineno)[1]]), stop.lineno)
            seen = epochs[:-1] if limit is not None and limit <= 1 else epochs  # one epoch without a best ended the run
            third = max(1, len(seen) // 3)
            fall = 1 - min(seen[-third:]) / min(seen[:-third])
            if limit is not None and 0 <= limit <= hasty and isinstance(planned, int) and len(epochs) < 0.7 * planned and fall > (still_falling if limit > 1 or len(epochs) > 0.1 * planned else still_falling / 4):
                yield (line, "measured", "harmful", f"Stopped after {len(epochs)} of {planned} epochs while validation loss was still falling",
                       "Raise the patience and compare with the best value, not the previous one.",
                       Evidence(f"the best validation loss of the last {third} epochs lies {fall:.0%} below the best before; patience {limit}",
                                "calls", fall, still_falling, len(epochs)))
