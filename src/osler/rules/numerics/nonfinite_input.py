from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.loaders import TRAIN, dataset_argument, loaders, roles
from osler.rules.script import (
    around,
    assignment,
    call_name,
    calls,
    function_around,
    function_named,
    origin,
    place,
    root,
    targets,
    tree,
)


@rule("nonfinite-input", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """NaN or infinity enters through the data.

    **What it is.** An input or target of a training batch holds values that are not finite: missing cells of a table, a
    division by a zero standard deviation, a log of a zero price, a damaged file.

    **How it is seen.** The tensor that entered the model (or the loss) was non-finite while all weights were finite, and the
    loss or the gradients became non-finite with it.

    **Why it matters.** One such row makes the loss of its batch NaN, and the step makes all weights NaN.

    **What to do.** Find the rows (`~torch.isfinite(x).all(1)`), then impute or drop them where the data are prepared.

    **When this is wrong.** Models that mask missing values themselves keep a finite loss and are not reported.

    **Source.** Handbook A §23, B §11.
    """
    seen = nonfinite.facts(window)
    spoiled = [f for f in seen if f.get("what") in nonfinite.SPREAD]
    entry = next((f for f in seen if nonfinite.from_data(window, f)), None)
    batch = next((f for f in window.facts("input") if (f.get("nonfinite") or 0) and f.get("phase") in (0, "train")), None)
    if not spoiled or (entry is None and batch is None):
        return
    fact = entry or batch
    assert fact is not None
    if entry is None and (spoiled[0].step < fact.step or spoiled[0].get("op_kind") not in (None, "unknown")):
        return
    count = nonfinite.operand(fact).get("nonfinite") if entry is not None else fact.get("nonfinite")
    at = source(window) or entered(window, fact) or fact.at
    yield Finding(
        "nonfinite-input", "certain", nonfinite.severity(window),
        f"A training batch holds {count or 'some'} values that are not finite",
        "Impute or drop these rows where the data are made; check with torch.isfinite(x).all().",
        Where.at(at, also=(str(fact.at),) if fact.at is not None and fact.at != at else ()), first_step=fact.step, last_step=fact.step,
        evidence=(Evidence(f"step {fact.step}: {count or 'some'} non-finite values in the batch, weights still finite; then {spoiled[0].get('what')} "
                           f"was {spoiled[0].get('value', 'not finite')}", "nonfinite", nonfinite.number(count), 0.0, 1),))


def source(window: Window) -> Location | None:
    """Where the tensor behind the training loader was made: in its data set's ``__init__``, or the variable it was given."""
    role = roles(window)
    for index, loader in loaders(window).items():
        if role.get(index, TRAIN) != TRAIN:
            continue
        item = place(loader.get("dataset_at"))
        found = held(window, item) if item is not None else None
        if found is not None:
            return found
        name = root(dataset_argument(window, loader))
        made = origin(window, loader.at, name) if name and loader.at is not None else None
        return behind(window, loader, made) if loader.at is not None else None
    return None


def held(window: Window, item: Location) -> Location | None:
    """The ``self.x = …`` that ``__getitem__`` reads first."""
    classes = [s for s in around(window, item) if isinstance(s, ast.ClassDef)]
    function = function_around(around(window, item))
    if not classes or function is None:
        return None
    read = [f"self.{n.attr}" for n in ast.walk(function) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"]
    sets = [s for s in ast.walk(classes[-1]) if isinstance(s, ast.Assign) and targets(s) & set(read)]
    return Location(item.file, min(s.lineno for s in sets)) if sets else None


def behind(window: Window, loader: Fact, made: ast.stmt | None) -> Location | None:
    """Through ``TensorDataset(x, y)``: the line that made ``x``."""
    if loader.at is None:
        return None
    holder = made if made is not None else next((s for s in around(window, loader.at)[-1:]), None)
    for call in calls(holder, "TensorDataset"):
        name = root(call.args[0]) if call.args else None
        found = assignment(window, loader.at.file, name, call.lineno) if name else None
        if found is not None:
            return Location(loader.at.file, found.lineno)
    return Location(loader.at.file, made.lineno) if made is not None else None


def prepared_by(window: Window, at: Location, argument: ast.expr) -> Location | None:
    """The division or logarithm inside the user's own function that prepares an input: ``net(standardise(x))``."""
    function = function_named(window, at.file, call_name(argument)) if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Name) else None
    risky = [n.lineno for n in ast.walk(function) if (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div))
             or (isinstance(n, ast.Call) and call_name(n) in ("log", "log2", "log10", "sqrt", "div"))] if function is not None else []
    return Location(at.file, min(risky)) if risky else None


def entered(window: Window, fact: Fact) -> Location | None:
    """Without a loader: the variable that the training code passes to the model."""
    at = fact.at
    statements = around(window, at)
    here = list(calls(statements[-1] if statements else None))
    prepared = next((p for c in here if c.args and at is not None and (p := prepared_by(window, at, c.args[0])) is not None), None)
    if prepared is not None:
        return prepared
    for call in here:
        name = root(call.args[0]) if call.args and call_name(call) not in ("backward", "step") else None
        found = origin(window, at, name) if name and at is not None else None
        if found is not None and at is not None and tree(window, at.file) is not None:
            return Location(at.file, found.lineno)
    return None
