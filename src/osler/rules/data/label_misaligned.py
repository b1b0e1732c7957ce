from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.augment_pairs import unpaired
from osler.rules.code_questions import quoted
from osler.rules.order_steps import Mismatch, labelish
from osler.rules.pairing import (
    Dependence,
    dataset_pair_line,
    deliberate,
    dependence,
    forecasts,
    learned,
    offset_line,
    on_purpose,
    parted,
    uses_of,
)
from osler.rules.script import FUNCTIONS, call_name, tree

FIX = "Reorder, drop and split inputs and targets together, with one index for both"
SAID = {"chance": "only one of the two was put in random order, or each in an order of its own", "sort": "only one of the two was sorted",
        "times": "copies are block by block on one side and side by side on the other", "offset": "they are taken at different positions",
        "other": "they are picked by different indices"}


@rule("label-misaligned", "data")
def check(window: Window, *, certain_z: float = 8.0, room: float = 0.15, same: float = 0.99) -> Iterator[Finding | NotChecked]:
    """Inputs and labels are paired by different indices.

    **What it is.** A shuffle, sort, filter or split that reaches the inputs but not the labels (or each in an order of its own), a label taken
    from the neighbouring row, two loaders shuffled separately and zipped; for sequences, a target that is not moved against its input, or twice.

    **How it is seen.** Twice. In the text: the order of rows is followed through indexing, shuffling, sorting and splitting, and input and target
    that meet in a loss or a data set carry different orders. In the process: a kernel regression on the training rows, its leave-one-out score
    against that of pairs in random order. Labels that cannot be told from their inputs (less than 4 spreads above chance) while those of the
    neighbouring rows, or the same labels in another order found in memory, can (`certain_z` spreads, `room` of the way from chance to certainty), are
    misaligned for certain. Rows that are told from their inputs well speak against what the text seems to say. For sequences: the target equals
    the input at the same position in `same` of places although outputs do not see later positions, or is moved by two. Where labels say nothing at all and files are
    read in the order of a directory, or of the letters of numbered names, that order is named. For masks and boxes: a
    function that returns image and mask flips, turns or crops one of them under a random condition and not the other.

    **Why it matters.** The model can only learn pairs by heart.

    **What to do.** Reorder, drop and split both with one index; keep pairs together in one data set; move the target by one, once.

    **When this is wrong.** Negative pairs, mixed samples and permutation tests pair other rows on purpose: a pair that the same block also
    uses in agreement is left out, and names that say so make it a note. Forecasts take the target from a later row: an offset counts only where
    the neighbouring row's label is told far better, and not where it stands among the features.

    **Source.** torchvision issue 4209; nanoGPT discussions. Handbook A §17 (stair collapse: label error).
    """
    dep = dependence(window)
    found = list(parted(window))
    told = list(sequences(window, same))
    if told:
        yield told[0]
        return
    for here, changed, left in unpaired(window):
        yield Finding("label-misaligned", "certain", "harmful", f"A random geometric change reaches {changed} and not {left}",
                      f"Draw once and apply the change to both, at {quoted(window, here, 'the change')}.", Where.at(here), first_step=0,
                      evidence=(Evidence(f"line {here.line} changes {changed} under a random condition; no statement under the same condition changes {left}", "source", None, None, 1),),
                      explains=("loss-plateau", "loss-crawl"))
        return
    if dep is None and not found:
        yield NotChecked("label-misaligned", "the training rows could not be read beside their targets")
        return
    if dep is not None and not dep.used and not found and not (isinstance(dep.fact.get("batch_z"), float | int) and float(dep.fact["batch_z"]) < 2.5):
        return  # the targets may be those of another task
    if dep is not None and dep.independent and dep.better_z >= certain_z and dep.room >= room:
        if dep.how.startswith("shift") and forecasts(window, dep):
            return
        at, also, why = where(window, dep, found)
        yield Finding(
            "label-misaligned", "certain", "note" if deliberate(window) or (at is not None and on_purpose(window, at.file, (at.line,))) else "harmful", title(dep), f"{FIX} at {quoted(window, at, 'the line where they part')}.",
            Where.at(at, also=also), first_step=0, evidence=(measured(dep), better(dep), *why), explains=("train-val-overlap", "overfit", "loss-plateau"))
        return
    strong = [(f, m) for f, m in found if m.kind in ("chance", "sort", "times")]
    weak = [(f, m) for f, m in found if m.kind == "other" and (m.extra_x or m.extra_y)]
    if dep is not None and not dep.independent and dep.used:
        return
    if learned(window):
        return
    if dep is not None and dep.independent and not found and (listed := by_listing(window)) is not None:
        line, how = listed
        yield Finding(
            "label-misaligned", "measured", "note" if deliberate(window) else "harmful", f"Labels say nothing about their inputs, which are read {how}",
            f"Sort the names by their number, or look each label up by the name of its file, at {quoted(window, line, 'the listing')}.", Where.at(line), first_step=0,
            evidence=(Evidence(f"line {line.line} decides the order of the inputs; the labels come from a list of their own", "source", None, None, 1), measured(dep)),
            explains=("overfit", "loss-plateau"))
        return
    for file, m in strong or (weak if dep is not None and dep.independent else []):
        meant = deliberate(window) or on_purpose(window, file, m.lines or (m.line,))
        at = Location(file, m.at)
        proved = dep is not None and dep.independent
        yield Finding(
            "label-misaligned", "measured" if proved else "suspected", "note" if meant else "harmful",
            f"Inputs and targets are in different orders: {SAID[m.kind]}", f"{FIX} at {quoted(window, at, 'this line')}.",
            Where.at(at, also=tuple(f"{file}:{n}" for n in (*m.lines, m.line) if n != m.at)), first_step=0,
            evidence=(text(m), *((measured(dep),) if dep is not None and proved else ())), explains=("overfit", "loss-plateau"))
        return


def title(dep: Dependence) -> str:
    if not dep.used:
        return f"The targets of a batch are not those of its rows ({dep.score:.0%} agree)"
    if dep.how.startswith("shift"):
        return f"Each input is paired with the label of the row {abs(int(dep.fact.get('shift') or 0))} {'after' if int(dep.fact.get('shift') or 0) < 0 else 'before'} its own"
    return "Labels say nothing about their inputs, in another order they do"


def measured(dep: Dependence) -> Evidence:
    what = "accuracy" if dep.fact.get("classes") else "rank correlation"
    if not dep.used:
        if dep.fact.get("kept") is not None and float(dep.fact["kept"]) < 0.6:
            return Evidence(f"the rows of the batch were found in the data set; {dep.score:.0%} of its targets are theirs", "experiment/label-dependence", dep.score, 0.9, None)
        return Evidence(f"{dep.fact.get('batch')} rows of the batch were found in {dep.fact.get('inputs')}; {dep.score:.0%} of their targets are those of {dep.fact.get('pair')} at the same rows",
                        "experiment/label-dependence", dep.score, 0.9, int(dep.fact.get("batch") or 0))
    return Evidence(f"leave-one-out {what} on {dep.fact.get('rows')} training rows: {dep.score:.2f}; in random order {dep.null:.2f} ± {dep.spread:.2f}", "experiment/label-dependence",
                    dep.score, dep.null + 4 * dep.spread, int(dep.fact.get("rows") or 0))


def better(dep: Dependence) -> Evidence:
    how = {"shift": f"labels of the row {dep.fact.get('shift'):+d}" if isinstance(dep.fact.get("shift"), int) else "neighbouring labels",
           "order": f"labels in the order {dep.fact.get('repair') or ''}", "rows": f"{dep.fact.get('pair') or 'targets of the data set'} at the same rows"}[dep.how.split()[0]]
    return Evidence(f"{how} are told with {dep.better:.2f}", "experiment/label-dependence", dep.better, dep.null + 8 * dep.spread, int(dep.fact.get("rows") or 0))


def text(m: Mismatch) -> Evidence:
    return Evidence(f"line {m.line} pairs `{m.input}` with `{m.target}`; only the {'inputs' if m.extra_x and not m.extra_y else 'targets' if m.extra_y and not m.extra_x else 'two'} "
                    f"{'were' if m.extra_x and m.extra_y else 'went'} through: {'; '.join((*m.extra_x, *m.extra_y))[:160]}", "source", None, None, 1)


def where(window: Window, dep: Dependence, found: list[tuple[str, Mismatch]]) -> tuple[Location | None, tuple[str, ...], tuple[Evidence, ...]]:
    wanted = ("offset", "other") if dep.how.startswith("shift") else ("chance", "sort", "times", "other", "offset")
    for file, m in sorted(found, key=lambda pair: wanted.index(pair[1].kind) if pair[1].kind in wanted else 9):
        if m.kind in wanted:
            return Location(file, m.at), tuple(f"{file}:{n}" for n in (*m.lines, m.line) if n != m.at), (text(m),)
    if dep.how.startswith("order") and (name := re.search(r"\[(?:argsort\()?([\w.]+)", str(dep.fact.get("repair")))):
        at = uses_of(window, name.group(1))
        if at is not None:
            return at, (), ()
    if dep.how.startswith("shift") and (at := offset_line(window)) is not None:
        return at, (), ()
    at = dataset_pair_line(window, dep)
    if at is None:
        criterion = next((f for f in window.facts("criterion") if f.get("phase") == 0), None)
        at = criterion.at if criterion is not None else None
    return at, (), ()


# -- sequences ------------------------------------------------------------------------------------------------------


def sequences(window: Window, same: float) -> Iterator[Finding]:
    """A language model whose target is its own input, or moved twice."""
    causal = [f for f in window.facts("experiment") if f.get("name") == "causality" and f.get("shift") is not None]
    for fact in causal:
        whole = any("int" in str((c.get("target") or {}).get("dtype")) for c in window.facts("criterion"))
        if fact.get("shift") == 0 and not fact.get("leak") and float(fact.get("agreement") or 0) >= same and whole:
            at = target_line(window, same_as_input=True) or criterion_line(window)
            yield moved(window, fact, at, "The target is the input itself: the model learns to repeat each token", 0)
            return
    for fact in window.facts("experiment"):
        if fact.get("name") == "token-shift" and fact.get("shift") == 2 and float(fact.get("share") or 0) >= same and set(fact.get("others") or ()) <= {2}:
            at = target_line(window, same_as_input=False) or criterion_line(window)
            yield moved(window, fact, at, "The target is moved by two positions: shifted in the data and again in the loss", 2)
            return


def moved(window: Window, fact: Fact, at: Location | None, claim: str, by: int) -> Finding:
    fix = "Take the target one position later than the input" if by == 0 else "Move the target once: in the data or in the loss"
    share = float(fact.get("agreement") or fact.get("share") or 0)
    return Finding("label-misaligned", "certain", "harmful", claim, f"{fix}, at {quoted(window, at, 'the target')}.", Where.at(at), first_step=0,
                   evidence=(Evidence(f"target[t] = input[t + {by}] in {share:.1%} of {fact.get('steps')} positions of a training batch", "experiment/causality" if by == 0 else "experiment/token-shift",
                                      share, 0.95, int(fact.get("steps") or 0)),), explains=("target-leak-feature", "overfit", "loss-plateau"))


def criterion_line(window: Window) -> Location | None:
    return next((f.at for f in window.facts("criterion") if f.get("phase") == 0), None)


def target_line(window: Window, same_as_input: bool) -> Location | None:
    """The statement that makes the target: the same text as the input's, or one that cuts it a position later."""
    for file in window.sources:
        module = tree(window, file)
        if module is None:
            continue
        for scope in [*(n for n in ast.walk(module) if isinstance(n, FUNCTIONS)), module]:
            seen: dict[str, int] = {}
            for s in scope.body:
                for target, value in bindings(s):
                    shown = ast.unparse(value)
                    if same_as_input and labelish(target):
                        source = value.func.value if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("clone", "copy", "detach") else value
                        if shown in seen or (isinstance(source, ast.Name) and source.id in names_of(scope)):
                            return Location(file, value.lineno)
                    if not same_as_input and labelish(target) and re.search(r"\+ 1|\[(:, )?1:|roll", shown):
                        return Location(file, value.lineno)
                    seen[shown] = value.lineno
            if same_as_input:
                for node in ast.walk(scope):
                    if isinstance(node, ast.Return | ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
                        a, b = (re.sub(r"\.(clone|long|copy)\(\)$", "", ast.unparse(e)) for e in node.value.elts)
                        if a == b:
                            return Location(file, node.lineno)
    return None


LISTINGS = ("listdir", "glob", "iglob", "rglob", "iterdir", "scandir")


def by_listing(window: Window) -> tuple[Location, str] | None:
    """Files in the order of a directory, or by the letters of names that are numbers without leading zeros, while labels are read elsewhere."""
    for file, text in window.sources.items():
        module = tree(window, file)
        if module is None or re.search(r"(label|target|cls|class_?id|\by)\w*\s*(=|\.append\().*(\.stem|\.parent|basename|\.split\(|\.name\b)", text):
            continue
        sorts = [c for c in ast.walk(module) if isinstance(c, ast.Call) and call_name(c) in ("sorted", "sort", "natsorted")]
        for call in (c for c in ast.walk(module) if isinstance(c, ast.Call) and call_name(c) in LISTINGS):
            by = next((s for s in sorts if call in ast.walk(s)), None)
            if by is None and any(call_name(s) == "sort" and abs(s.lineno - call.lineno) <= 4 for s in sorts):
                continue
            if by is None:
                return Location(file, call.lineno), "in the order in which the directory lists them"
            if call_name(by) != "natsorted" and not by.keywords and re.search(r"[\"'][^\"'\n]*(\{\w*\}|%d|%i)\.\w+[\"']|str\(\w+\)\s*\+\s*[\"']\.\w+", text):
                return Location(file, call.lineno), "by the letters of their names (10 before 2)"
    return None


def names_of(scope: ast.AST) -> set[str]:
    return {t.id for n in ast.walk(scope) if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name) and not labelish(t)}


def bindings(s: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(s) if not isinstance(s, (*FUNCTIONS, ast.ClassDef)) else ():
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                yield from zip(target.elts, value.elts, strict=True)
            else:
                yield target, value
