from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import attribute_line, nodes, quoted, spot
from osler.rules.graph_questions import (
    CONTAINERS,
    Pass,
    ancestors,
    call_line,
    count,
    cut_in,
    escape_in,
    modules,
    parameters,
    passes,
    shown,
    starved,
)


@rule("unused-module", "wiring")
def check(window: Window, *, least_steps: int = 3) -> Iterator[Finding | NotChecked]:
    """Registered parameters that do not influence the loss.

    What it is: a layer runs and its result is dropped (a loop that keeps feeding the first activation, an embedding that is computed
    and not added), or it is never called at all.
    How it is seen: optimized parameters without a gradient in at least `least_steps` steps, whose values, followed through the recorded
    program, end before the loss.
    Why it matters: the model is smaller than it looks: what the layer should contribute (depth, time, position) is missing.
    What to do: use the result, or remove the layer.
    When this is wrong: heads and experts of other tasks, stochastic depth, and spare layers of library models get no gradient by
    design: a layer that never runs is a note, a layer that a library class leaves out is none. Whoever passes find_unused_parameters=True
    to DistributedDataParallel knows of it: a note.
    Source: torch DistributedDataParallel documentation (unused parameters).
    """
    lacking = starved(window)
    known = parameters(window)
    never = {u for u in lacking.never if not known.get(u, {}).get("loaded")}
    if not never or not lacking.settled or lacking.steps < least_steps or any(f.get("use_reentrant") for f in window.facts("checkpoint-call")):
        return
    runs = passes(window)
    if not runs:
        yield NotChecked("unused-module", "no step was recorded operation by operation")
        return
    if not any(run.needed for run in runs) or all(f.get("root_op", "") is None for f in window.facts("backward")):
        return
    dropped, silent = sort_out(runs, never)
    if dropped:
        yield told(window, dropped, called=runs)
    elif silent:
        yield from never_called(window, silent)


def sort_out(runs: list[Pass], never: set[int]) -> tuple[set[int], set[int]]:
    """Parameters whose operations ran without reaching the loss, and those that no operation used."""
    used = {u for run in runs for u in never if run.uses({u})}
    dropped = set()
    for u in used:
        mine = [run for run in runs if run.uses({u})]
        if all(not any(op.index in run.needed for op in run.uses({u})) and cut_in(run, {u}) is None and escape_in(run, {u}) is None for run in mine):
            dropped.add(u)
    return dropped, never - used


def outermost(window: Window, uids: set[int]) -> dict[str, Any] | None:
    """The largest module all of whose parameters are among ``uids``, for the first of them."""
    known, mods = parameters(window), modules(window)
    first = next((known[u] for u in sorted(uids) if u in known), None)
    if first is None:
        return None
    found = None
    for m in ancestors(mods, first["module"]):
        inside = {u for u, p in known.items() if (o := mods.get(p["module"])) and o["root"] == m["root"]
                  and (o["name"] == m["name"] or o["name"].startswith(m["name"] + ".") or not m["name"])}
        if not inside <= uids or (not m.get("library") and hands_back(window, str(m["class"]))):
            break
        if m["class"] not in ("ModuleList", "ModuleDict"):
            found = m
    return found


def hands_back(window: Window, name: str) -> bool:
    """The class's forward returns one of its arguments as it came: what it computes is dropped inside, not by its caller."""
    for _, node in nodes(window, lambda n: isinstance(n, ast.ClassDef) and n.name == name):
        for forward in (f for f in ast.walk(node) if isinstance(f, ast.FunctionDef) and f.name == "forward"):
            changed = {t.id for t in ast.walk(forward) if isinstance(t, ast.Name) and isinstance(t.ctx, ast.Store)}
            given = {a.arg for a in forward.args.args[1:]} - changed
            if any(isinstance(r, ast.Return) and isinstance(r.value, ast.Name) and r.value.id in given for r in ast.walk(forward)):
                return True
    return False


def told(window: Window, uids: set[int], called: list[Pass]) -> Finding:
    known, mods = parameters(window), modules(window)
    module = outermost(window, uids)
    first = min(uids)
    op: Op | None = next((o for run in called for o in run.uses({first})), None)
    place = call_line(mods, op, module["id"]) if op is not None and module is not None else op.at if op is not None else None
    name = (module["name"] or module["class"]) if module is not None else known.get(first, {}).get("name", "a parameter")
    built = spot(module.get("at")) if module is not None else None
    all_names = [known[u]["name"] for u in sorted(uids) if u in known]
    expected = any(f.get("find_unused_parameters") for f in window.facts("ddp"))
    return Finding(
        "unused-module", "certain", "note" if expected else "harmful", f"{name} runs and its result never reaches the loss",
        f"Use the result of {quoted(window, place, name)}, or remove {name}.", Where.at(place or built, module=name, also=(str(built),) if built and built != place else ()), first_step=0,
        evidence=(Evidence(f"{count(len(uids), 'parameter')} ({shown(all_names)}) never got a gradient; their operations run, and no value of theirs enters the loss", "gradients/never",
                           value=float(len(uids)), threshold=0.0, samples=starved(window).steps),), explains=("loss-plateau", "vanishing-gradients"))


def never_called(window: Window, uids: set[int]) -> Iterator[Finding]:
    module = outermost(window, uids)
    known, mods = parameters(window), modules(window)
    holder = next((m for m in ancestors(mods, module["id"])[1:] if m["class"] not in CONTAINERS), None) if module is not None else None
    if holder is not None and holder.get("library"):
        return
    direct = next((known[u] for u in sorted(uids) if u in known), None)
    if module is None and direct is None:
        return
    name = module["name"] or module["class"] if module is not None else str(direct["name"] if direct else "")
    place: Location | None = (spot(module.get("at")) if module is not None else None) or attribute_line(window, name.split(".")[-1])
    yield Finding(
        "unused-module", "certain", "note", f"{name} was never used in the steps looked at",
        f"Call {name} in forward, or remove {quoted(window, place, 'it')}.", Where.at(place, module=name), first_step=0,
        evidence=(Evidence(f"{count(len(uids), 'parameter')} never got a gradient and no recorded operation used them", "gradients/never", value=float(len(uids)), threshold=0.0,
                           samples=starved(window).steps),))
