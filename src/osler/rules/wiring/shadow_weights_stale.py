from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import assigned, dotted, enclosing, nodes, quoted, spot

AVERAGE = re.compile(r"ema|target|average|averaged|avg|shadow|momentum|swa|teacher|polyak|slow", re.I)
FIXED = re.compile(r"\b(ref|reference|init|initial|frozen|anchor|prior|old|base)\w*", re.I)


@rule("shadow-weights-stale", "wiring")
def check(window: Window, *, least_steps: int = 10) -> Iterator[Finding]:
    """A copy of the model that should follow it is never updated.

    What it is: the averaged copy (EMA, SWA) or the target network keeps the weights it was copied with: the update rebinds a local
    name, or is never called.
    How it is seen: a module with the same layout as a trained one, equal to it when it was copied, that takes part in the run; after at
    least `least_steps` steps of the original not one of its values has changed.
    Why it matters: what is evaluated (or bootstrapped from) is the untrained model.
    What to do: update in place, `s.mul_(decay).add_(p, alpha=1 - decay)` or `s.lerp_(p, 1 - decay)`, after every step.
    When this is wrong: reference models, frozen teachers and copies of a trained model stay fixed by design and are not reported.
    Source: lucidrains/DALLE2-pytorch issue 131; pytorch-image-models issue 1831.
    """
    if not window.final or window.n_steps < least_steps:
        return
    newest = {int(f.get("root", -1)): f for f in window.facts("shadow")}
    for fact in newest.values():
        if fact.get("changed") or not fact.get("same_at_start") or fact.get("trained_before_copy"):
            continue
        used = str(fact.get("called_in"))
        rebinding = rebinds(window)
        uncalled = never_called(window)
        name = assigned(window, fact.at) or str(fact.get("class"))
        itself = with_itself(window) if not rebinding and not uncalled else None
        meant = bool(rebinding or uncalled or itself or AVERAGE.search(name) or mentions(window, fact.at))
        if used in ("never", "unseen") and not rebinding and not uncalled and not itself:
            meant = False
        if FIXED.search(name) and not rebinding:
            meant = False
        place = rebinding or itself or (after_step(window) if uncalled else None) or fact.at
        how = "the update assigns to a loop variable, which changes nothing" if rebinding else f"{uncalled} is never called" if uncalled else \
            "the update reads the copy itself" if itself else "nothing writes to it"
        yield Finding(
            "shadow-weights-stale", "certain", "harmful" if meant else "note", f"{name} never changes although the model it was copied from is trained: {how}",
            f"Write into its tensors (lerp_, mul_ and add_, copy_) at {quoted(window, place, 'the update')}." if rebinding or not uncalled else f"Call {uncalled} after {quoted(window, place, 'the step')}.",
            Where.at(place, module=str(fact.get("class")), also=(str(fact.at),) if fact.at is not None and fact.at != place else ()), first_step=1, last_step=window.n_steps,
            evidence=(Evidence(f"all values of the copy made at {fact.at} are those it was copied with after {window.n_steps} steps of the original; it is used in {used}", "shadow/changed",
                               value=0.0, threshold=0.0, samples=window.n_steps),), explains=("overfit", "loss-plateau"))
        return


def loops_over_parameters(window: Window) -> list[tuple[Location, ast.For]]:
    def over(node: ast.AST) -> bool:
        return isinstance(node, ast.For) and any(isinstance(n, ast.Attribute) and n.attr in ("parameters", "named_parameters", "buffers", "values", "items") for n in ast.walk(node.iter))
    return [(at, n) for at, n in nodes(window, over) if isinstance(n, ast.For)]


def rebinds(window: Window) -> Location | None:
    """In a loop over two sets of parameters, an assignment to a loop variable itself (or to an entry of a fresh state_dict)."""
    for at, loop in loops_over_parameters(window):
        names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        if len(names) < 2:
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
                used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                if len(used & names) >= 2 or (used & names and any(isinstance(n, ast.BinOp) for n in ast.walk(node.value))):
                    return Location(at.file, node.lineno)
    return rebound_entry(window)


def rebound_entry(window: Window) -> Location | None:
    """`state[k] = ...` on what `state_dict()` returned, without a load_state_dict of it."""
    fresh = {t.id for _, n in nodes(window, lambda n: isinstance(n, ast.Assign) and any(isinstance(c, ast.Attribute) and c.attr == "state_dict" for c in ast.walk(n.value)))
             for t in ast.walk(n) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
    given = {a.id for _, n in nodes(window, lambda n: isinstance(n, ast.Call) and dotted(n.func).endswith("load_state_dict")) if isinstance(n, ast.Call)
             for a in n.args if isinstance(a, ast.Name)}
    found = nodes(window, lambda n: isinstance(n, ast.Assign) and any(isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id in fresh - given for t in n.targets))
    return found[0][0] if found else None


def with_itself(window: Window) -> Location | None:
    """``ema.update(ema.module)``: the copy is averaged with itself."""
    def same(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args or "update" not in node.func.attr.lower():
            return False
        holder, given = dotted(node.func.value), dotted(node.args[0])
        return bool(holder) and bool(AVERAGE.search(holder)) and (given == holder or given.startswith(holder + "."))

    found = nodes(window, same)
    return found[0][0] if found else None


def never_called(window: Window) -> str | None:
    """A function that updates one set of parameters from another, and that no line calls."""
    called = {dotted(n.func).split(".")[-1] for _, n in nodes(window, lambda n: isinstance(n, ast.Call)) if isinstance(n, ast.Call)}
    for at, loop in loops_over_parameters(window):
        function = next((n for n in enclosing(window, at, (ast.FunctionDef,))), None)
        writes = any(isinstance(n, ast.Attribute) and n.attr in ("lerp_", "mul_", "copy_", "add_") for n in ast.walk(loop))
        if isinstance(function, ast.FunctionDef) and writes and function.name not in called and not function.name.startswith("__"):
            return function.name
    return None


def mentions(window: Window, at: Location | None) -> bool:
    """The class or function that makes the copy speaks of an average."""
    around = next(enclosing(window, at, (ast.ClassDef, ast.FunctionDef)), None)
    return around is not None and bool(AVERAGE.search(str(getattr(around, "name", ""))))


def after_step(window: Window) -> Location | None:
    counts = window.last("cycle")
    rows = counts.get("optimizers") or () if counts is not None else ()
    return next((p for r in rows if (p := spot((r.get("last_lines") or {}).get("step"))) is not None), None)
