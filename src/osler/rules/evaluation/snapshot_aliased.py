from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.script import (
    LOOPS,
    around,
    bound,
    calls,
    dotted,
    function_around,
    parse,
    place,
    root,
    targets,
    training_functions,
    trains,
    tree,
    words,
)

COPIES = frozenset(("deepcopy", "clone", "copy", "numpy", "save", "load", "tolist"))


@rule("snapshot-aliased", "evaluation")
def check(window: Window, *, least_share: float = 0.9) -> Iterator[Finding]:
    """The state kept of the best model is the memory of the model itself.

    What it is: `best = model.state_dict()`, or `best = model`, keeps references, not values: training goes on in the same tensors, and what is loaded, tested or
    saved at the end is the last model.
    How it is seen: `load_state_dict` after training is given tensors that lie where the model's own parameters lie (`least_share` of the
    expected ones); or the text binds the model or its state_dict() to such a name under a condition in the training loop and reads that name after it.
    Why it matters: the model that is tested and saved is the last one, not the best one.
    What to do: `copy.deepcopy(model.state_dict())`, or clone every tensor.
    When this is wrong: a search makes another model in each round, and may keep it as it is: loops that rebind the model are left out. `.cpu()` copies only from a device; a script written for one and run on a CPU gets a note, since it is right where it was meant to run.
    Source: the torch tutorial "Saving and loading models" (state_dict returns a reference). The share only leaves room for entries added by hand.
    """
    for fact in window.facts("load-state-dict"):
        aliased, expected = int(fact.get("aliased") or 0), int(fact.get("expected") or 0)
        if not fact.step or expected < 1 or aliased < least_share * expected:
            continue
        taken = taken_at(window, fact.at)
        moved = taken is not None and any(n in ("cpu", "to") for n in _words_at(window, taken))
        if taken is not None and taken == fact.at:
            continue  # model.load_state_dict(model.state_dict()): nothing was to be restored
        yield Finding(
            "snapshot-aliased", "certain", "note" if moved else "harmful", "the state that is restored is the memory of the model itself: nothing comes back",
            f"Copy what is kept: copy.deepcopy({quoted(window, taken, 'model.state_dict()')}).",
            Where.at(taken or fact.at, also=(str(fact.at),) if taken is not None and fact.at is not None else ()), first_step=fact.step,
            evidence=(Evidence(f"{aliased} of the {expected} tensors given to load_state_dict at {fact.at} share their memory with the parameters they are to replace",
                               "load-state-dict/aliased", value=aliased / expected, threshold=least_share, samples=expected),))
        return
    for at, what, used in kept(window) if window.n_steps > 1 else ():
        yield Finding(
            "snapshot-aliased", "certain", "harmful", f"what is kept of the best model is the model itself: {what}",
            f"Copy it: copy.deepcopy(...) at {quoted(window, at, 'that line')}.", Where.at(at, also=(f"{at.file}:{used}",)), first_step=1,
            evidence=(Evidence(f"line {at.line} binds a second name to the same tensors inside the training loop, which goes on writing to them; that name is read after it, at line {used}",
                               "source", samples=1),))
        return


KEPT = re.compile(r"best|snapshot|champion|checkpoint|ckpt|optimal", re.I)


def kept(window: Window) -> Iterator[tuple[Location, str, int]]:
    """Assignments of a trained model, or of its state_dict(), to another name under a condition in the training loop, where that name is read after the loop."""
    for file, text in window.sources.items():
        module = parse(text)
        trainers = training_functions(window, file)
        for loop in (n for n in ast.walk(module) if isinstance(n, LOOPS)) if module is not None else ():
            if not trains(loop, trainers):
                continue
            rebound = bound(loop)
            for branch in (n for n in ast.walk(loop) if isinstance(n, ast.If)):
                for node in (n for n in ast.walk(branch) if isinstance(n, ast.Assign) and len(n.targets) == 1):
                    name, source = dotted(node.targets[0]), model_of(node.value)
                    if name is None or source is None or not KEPT.search(name) or source in rebound or source == name or not is_model(module, source):
                        continue
                    scope: ast.AST = function_around(around(window, Location(file, loop.lineno))) or module  # type: ignore[assignment]
                    used = [n.lineno for n in ast.walk(scope) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load) and dotted(n) == name
                            and n.lineno > (loop.end_lineno or loop.lineno)]
                    if used:
                        yield Location(file, node.lineno), ast.unparse(node), used[0]


def model_of(value: ast.expr) -> str | None:
    """``model`` for ``model`` or ``model.state_dict()``."""
    if isinstance(value, ast.Call):
        method = isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict" and not value.args
        return dotted(value.func.value) if method and isinstance(value.func, ast.Attribute) else None
    return dotted(value)


def is_model(module: ast.AST | None, name: str) -> bool:
    """Its parameters() are asked for, or it is put in training mode, somewhere in the text."""
    return any(isinstance(c.func, ast.Attribute) and dotted(c.func.value) == name for c in calls(module, "parameters", "train", "named_parameters"))


def taken_at(window: Window, at: Location | None) -> Location | None:
    """The line that took the state which is loaded at a line; that line itself where it takes it on the spot."""
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None:
        return None
    load = next((c for c in calls(module, "load_state_dict") if c.lineno <= at.line <= (c.end_lineno or c.lineno)), None)
    given = load.args[0] if load is not None and load.args else next((k.value for k in load.keywords), None) if load is not None else None
    if given is None:
        return None
    if any(True for _ in calls(given, "state_dict")):
        return at
    name = root(given)
    takes = [n for n in ast.walk(module) if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None and any(True for _ in calls(n.value, "state_dict"))
             and not words(n.value) & COPIES]
    same = [n for n in takes if name in targets(n) or any(name and name.split(".")[-1] in t for t in targets(n))]
    chosen = (same or takes)[-1:] if same or takes else []
    return place(f"{at.file}:{chosen[0].lineno}") if chosen else None


def _words_at(window: Window, at: Location) -> set[str]:
    module = tree(window, at.file)
    return {w for n in ast.walk(module) if isinstance(n, ast.stmt) and n.lineno == at.line for w in words(n)} if module is not None else set()
