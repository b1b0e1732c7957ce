from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.growth_questions import Container, Site, bounded, containers, keyed_by_index, resident, sites, wasted
from osler.rules.loaders import loaders
from osler.rules.script import FUNCTIONS, call_name, calls, parse
from osler.rules.stack_questions import step_loops

ARRAYS = ("tensor", "ndarray")
LIGHT = frozenset(("int", "float", "str", "bool", "NoneType", "bytes", "complex"))


@rule("python-memory-leak", "memory")
def check(window: Window, *, heavy: int = 1000, total: float = 2.5e5, often: float = 6.0) -> Iterator[Finding | NotChecked]:
    """A plain container grows with every sample or step.

    **What it is.** A list, dict, set or queue that outlives the step takes an entry at every sample or step and lets none go: samples a data set remembers,
    a cache whose keys never repeat, copies of gradients, hooks registered again and again, log records, rows of a table.

    **How it is seen.** Lengths of the containers that the program's variables and objects hold were looked at now and then. One grew from look to look as fast at the end as at the start, its entries are
    heavy (tensors, arrays or `heavy` bytes each, `total` bytes together, or functions and hooks) or come `often` times a step and more, and no line of the
    script empties, renews or limits it.

    **Why it matters.** Memory grows until the process is killed, usually hours into a run.

    **What to do.** Keep numbers instead of tensors, bound the container (`deque(maxlen=...)`, `lru_cache(maxsize=...)`), empty it once an epoch, remove hooks.

    **When this is wrong.** A history of one number a step is no leak and is not named; a cache keyed by the item's index is bounded by the data set; buffers whose text
    shows a limit are left alone even if the run ended before they were full.

    **Source.** tier4/Diffusion-Planner pull request 372; pytorch issue 13246. Thresholds: a quarter of a megabyte in a run of seconds is gigabytes in one of days.
    """
    if window.last("growth") is None:
        yield NotChecked("python-memory-leak", "the run was too short to see containers grow")
        return
    rows = max((int(f.get("rows") or 0) for f in loaders(window).values()), default=0)
    found: list[tuple[int, Finding]] = []
    for c in containers(window):
        if c.grad or not c.steady or c.often < 2 or c.maxlen is not None:
            continue
        judged = weigh(window, c, rows, heavy, total, often)
        if judged is not None:
            found.append((c.weight, finding(window, c, *judged)))
    order = sorted(found, key=lambda pair: (pair[1].severity == "note", -pair[0]))
    places: set[object] = set()
    for _, f in order[:3]:
        if f.where.line not in places:
            places.add(f.where.line)
            yield f


def weigh(window: Window, c: Container, rows: int, heavy: int, total: float, often: float) -> tuple[str, Location, str] | None:
    """Severity, line and what is told of a container that grows; ``None`` if that is harmless."""
    if c.type in ("hooks", "figures", "param_groups", "lru_cache"):
        return registry(window, c, rows)
    found = sites(window, c.variable)
    if not found or bounded(window, c.variable):
        return None
    at = in_function_that_ran(found, c).at
    if c.type in ARRAYS:
        if c.weight < total or not any(isinstance(s.call, ast.Assign) for s in found):
            return None
        return "wasteful", at, f"it grew by {c.weight / 1e6:.1f} MB"
    if keyed_by_index(window, found) and (not rows or c.lens[-1] <= rows):
        return None
    kind = c.element.split(" of ")[-1]
    callables = kind in ("function", "method", "builtin_function_or_method", "partial", "RemovableHandle")
    beyond = c.lens[-1] > 1.05 * rows
    if c.type == "DataFrame":
        return ("wasteful", at, "a table that is copied whole for every row") if c.lens[-1] >= 100 and c.rate >= 0.5 else None
    big = kind in ARRAYS or kind not in LIGHT
    if c.bytes >= heavy and c.weight >= total:
        return ("wasteful" if c.rate >= 0.2 else "note"), at, f"{c.rate:.2g} entries a step of about {c.bytes / 1e3:.1f} kB: {c.weight / 1e6:.1f} MB so far"
    if callables and c.rate >= 0.5:
        return "wasteful", at, f"{c.rate:.2g} entries a step, each of which holds what it refers to"
    if c.rate >= often and c.lens[-1] >= 500 and beyond:
        return "wasteful" if c.weight >= total / 5 or big else "note", at, f"{c.rate:.0f} entries a step, {c.lens[-1]} so far"
    if big and c.bytes >= heavy and c.rate >= 0.5:
        return "note", at, f"{c.rate:.2g} entries a step of about {c.bytes / 1e3:.1f} kB"
    return None


def in_function_that_ran(found: list[Site], c: Container) -> Site:
    """The site in a function that runs for items or steps rather than in a constructor."""
    return next((s for s in found if s.function not in ("__init__", "<module>") and (c.where is None or s.function == c.where.function)),
                next((s for s in found if s.function != "__init__"), found[0]))


def registry(window: Window, c: Container, rows: int) -> tuple[str, Location, str] | None:
    grown = c.lens[-1] - c.lens[0]
    if c.type == "lru_cache":
        at = cached(window, c.variable)
        if c.maxlen is not None or at is None or c.lens[-1] < 200 or c.rate < 0.9 or (rows and c.lens[-1] <= rows):
            return None
        return "wasteful", at, f"a cache without limit took {c.rate:.2g} entries a step, {c.lens[-1]} so far"
    if grown < 4 or c.often < 3:
        return None
    names = {"hooks": ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_backward_hook", "register_full_backward_pre_hook"),
             "figures": ("figure", "subplots"), "param_groups": ("add_param_group",)}[c.type]
    at = called_in_loop(window, names)
    if at is None:
        return None
    if c.type == "param_groups" and c.lens[-1] < 12:
        return "note", at, f"{grown} more parameter groups"
    return "wasteful", at, f"{grown} more {c.type} by step {c.steps[-1]}"


def called_in_loop(window: Window, names: tuple[str, ...]) -> Location | None:
    """Where one of these is called, preferably from a training loop."""
    for file, loop in step_loops(window):
        for call in calls(loop, *names):
            return Location(file, call.lineno)
    for file, text in window.sources.items():
        module = parse(text)
        for call in calls(module, *names):
            return Location(file, call.lineno)
    return None


def cached(window: Window, name: str) -> Location | None:
    for file, text in window.sources.items():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, FUNCTIONS) and node.name == name and node.decorator_list:
                return Location(file, node.decorator_list[0].lineno, name)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and any("cache" in call_name(c) for c in calls(node.value)) \
                    and any(getattr(t, "id", getattr(t, "attr", None)) == name for t in node.targets):
                return Location(file, node.lineno)
    return None


def finding(window: Window, c: Container, severity: str, at: Location, what: str) -> Finding:
    grown = resident(window)
    return Finding(
        "python-memory-leak", "measured", wasted(window) if severity == "wasteful" else severity, f"{c.name} ({c.type}) grows and is never emptied: {what}",
        f"Bound it, empty it once an epoch, or keep numbers only: {quoted(window, at, 'this line')}.", Where.at(at), first_step=c.steps[0], last_step=c.steps[-1],
        evidence=(Evidence(f"length {c.lens[0]} at step {c.steps[0]}, {c.lens[-1]} at step {c.steps[-1]}, as fast at the end as before", "growth", float(c.lens[-1]), float(c.lens[0]), len(c.lens)),
                  *((Evidence(f"resident memory was {grown[0]:.0f} MB at the start and {grown[1]:.0f} MB at the end", "growth", grown[1]),) if grown else ())))
