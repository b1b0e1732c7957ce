from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.script import (
    LOOPS,
    around,
    below_function,
    call_name,
    calls,
    function_named,
    training_functions,
    trains,
    words,
)
from osler.rules.stack_questions import Row, header, innermost, step_line, step_loops, times

PULLS = frozenset(("item", "tolist", "numpy", "cpu", "__float__"))
FILES = frozenset(("save", "savez", "savez_compressed", "savetxt", "to_csv", "to_json", "to_parquet", "savefig", "dump", "flush", "fsync", "save_pretrained", "save_checkpoint",
                   "imwrite", "imsave", "write_text", "write_bytes"))
WRITES = FILES | frozenset(("print", "write", "writelines", "writerow", "writerows", "info", "debug", "warning", "critical", "add_scalar", "add_scalars", "add_histogram", "add_image",
                            "add_figure", "log_metrics", "dumps", "pformat", "pprint", "log_metric", "histogram", "open"))
KEEPS_HOUSE = frozenset(("collect", "empty_cache", "synchronize", "memory_summary", "memory_stats", "malloc_trim"))
OVER = frozenset(("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "state_dict", "params", "grads", "layers"))
GENERAL = re.compile(r"^(log|write|save|record|report|dump|emit|track|checkpoint|snapshot|monitor|print|update)", re.I)


@rule("per-step-sync", "throughput")
def check(window: Window, *, share: float = 0.1, least: float = 0.03) -> Iterator[Finding | NotChecked]:
    """Values are pulled to Python or written out at every step.

    **What it is.** In the body of the training loop, at every step, tensors become Python numbers by the dozen, lines are printed, files
    are written or flushed, checkpoints are saved, caches are emptied.

    **How it is seen.** The stack of the training thread was looked at now and then. Looks that fell on such a line of the loop (or of a
    function that the loop calls unconditionally) took `share` of the time or more; between `least` and `share` it is a note. A single
    value a step counts only from 2.5 times `share` on. Files written at every step are noted whatever they cost here.

    **Why it matters.** On an accelerator each value waits for all work queued before it, and the device idles meanwhile; on any machine a write
    to a slow disk or terminal stops the loop.

    **What to do.** Keep `loss.detach()` and convert once every n steps; write every n steps or once an epoch; buffer lines.

    **When this is wrong.** On a CPU one `loss.item()` a step costs nothing and is not named. A script whose steps take microseconds spends a
    share on anything; conditions like `step % 50 == 0` are understood, a hand-made timer is not.

    **Source.** PyTorch performance tuning guide, "avoid unnecessary CPU-GPU synchronization"; Handbook B §14. Thresholds: VOCABULARY, speed hints
    below 10 % of step time are notes.
    """
    told = times(window)
    if told is None:
        yield NotChecked("per-step-sync", "the run was too short for shares of time")
    groups: dict[Location, list[tuple[Row, Location, str]]] = {}
    loop_seconds = 0.0
    for row in told.rows if told is not None else ():
        at = step_line(window, row.stack)
        if at is None and row.kind != "loader":
            continue
        loop_seconds += row.seconds
        if at is None or row.kind in ("loader", "backward") or not row.stack:
            continue
        what = next((w for frame in row.stack[: row.stack.index(at) + 1] if (w := effect(window, frame))), None) or by_helper(window, at)
        if what is not None and not in_forward(window, row, at):
            groups.setdefault(Location(at.file, at.line, at.function), []).append((row, row.stack[0], what))
    found = False
    for group in merged(window, groups) if told is not None and loop_seconds > 0 else ():
        seconds = sum(row.seconds for row, _, _ in group)
        part = seconds / loop_seconds
        samples = sum(row.samples for row, _, _ in group)
        at = chosen(window, group)
        what = max(("write", "pull", "house"), key=lambda w: sum(r.seconds for r, _, k in group if k == w))
        limit = share * (2.5 if what == "pull" and not many(window, at) else 1.0)
        floor = limit * 0.6 if what == "pull" else least
        if part < floor or samples < 3:
            continue
        found = True
        yield finding(window, at, what, part, samples, "measured", "wasteful" if part >= limit and samples > 5 else "note", loop_seconds, share, group)
    if not found:
        yield from written(window)


def effect(window: Window, at: Location) -> str | None:
    """What a line does that makes it wait: ``write``, ``pull``, ``house``; ``None`` for other lines. A line in a loop over parameters
    or modules does what that loop does."""
    statements = below_function(around(window, at))
    training = training_functions(window, at.file)
    wider: list[ast.AST] = [s for s in statements[:-1] if isinstance(s, ast.For) and not trains(s, training) and OVER & words(s.iter)]
    for part in ([*header(statements[-1])] if statements else []), wider[-1:]:
        found = kind_of({call_name(c) for node in part for c in calls(node)})
        if found is not None:
            return found
    return None


def kind_of(names: set[str]) -> str | None:
    return "house" if names & KEEPS_HOUSE else "write" if names & WRITES else "pull" if names & PULLS else None


def by_helper(window: Window, at: Location) -> str | None:
    """A line that calls a function of the user's named after logging or saving does what that function does."""
    statement = innermost(window, at)
    for call in (c for part in (header(statement) if statement is not None else ()) for c in calls(part)):
        function = function_named(window, at.file, call_name(call)) if GENERAL.search(call_name(call)) else None
        found = kind_of({call_name(c) for c in calls(function)}) if function is not None else None
        if found is not None:
            return found
    return None


def in_forward(window: Window, row: Row, at: Location) -> bool:
    """The look fell into the model, reached from this line: `print(model(x).item())` is not all print."""
    return row.kind in ("forward", "step") and not any(effect(window, f) for f in row.stack[: row.stack.index(at)])


def many(window: Window, at: Location) -> bool:
    """Whether the line pulls several values a step: in a loop of its own, a comprehension, or as a whole list."""
    statements = below_function(around(window, at))
    training = training_functions(window, at.file)
    if any(isinstance(s, LOOPS) and not trains(s, training) for s in statements):
        return True
    parts = header(statements[-1]) if statements else []
    names = [call_name(c) for p in parts for c in calls(p)]
    inside = any(isinstance(n, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp) for p in parts for n in ast.walk(p))
    return inside or "tolist" in names or "numpy" in names or names.count("item") + names.count("cpu") > 2 or not set(names) & PULLS


def merged(window: Window, groups: dict[Location, list[tuple[Row, Location, str]]]) -> Iterator[list[tuple[Row, Location, str]]]:
    """Neighbouring lines of one kind in the loop are one finding (open, write, flush)."""
    here: list[tuple[Row, Location, str]] = []
    last: Location | None = None
    kind = ""
    for at in sorted(groups, key=lambda a: (a.file, a.line)):
        now = groups[at][0][2]
        if last is not None and (at.file != last.file or at.line - last.line > 4 or (now == "pull") != (kind == "pull")):
            yield here
            here = []
        here += groups[at]
        last, kind = at, now
    if here:
        yield here


def chosen(window: Window, group: list[tuple[Row, Location, str]]) -> Location:
    """The line to change: the one in the loop that took most, unless it calls something that is not named after writing."""
    seconds: dict[Location, float] = {}
    for row, inner, _ in group:
        outer = step_line(window, row.stack) or inner
        statement = innermost(window, outer)
        names = [call_name(c) for part in (header(statement) if statement is not None else ()) for c in calls(part)]
        at = outer if effect(window, outer) or any(GENERAL.search(n) for n in names) else next((f for f in row.stack if effect(window, f)), inner)
        seconds[at] = seconds.get(at, 0.0) + row.seconds
    return max(seconds, key=lambda a: seconds[a])


WORDS = {"write": ("Output is written at every step", "Write every n steps or once an epoch"), "pull": ("Values are pulled to Python at every step",
         "Keep detached tensors and convert them once every n steps"), "house": ("Caches are emptied or the device is waited for at every step", "Take it out of the loop")}


def finding(window: Window, at: Location, what: str, part: float, samples: int, certainty: str, severity: str, seconds: float, share: float,
            group: list[tuple[Row, Location, str]]) -> Finding:
    inner = sorted({str(i) for _, i, _ in group if i != at})[:3]
    title, fix = WORDS[what]
    return Finding("per-step-sync", certainty, severity, f"{title}: {part:.0%} of the training time", f"{fix}: {quoted(window, at, 'this line')}.",
                   Where.at(Location(at.file, at.line, at.function), also=tuple(inner)),
                   evidence=(Evidence(f"{samples} looks at the running loop fell on it, {part:.0%} of {seconds:.1f} s", "time", part, share, samples),))


def written(window: Window) -> Iterator[Finding]:
    """Files written by a line of the training loop at every step, or by a function it calls, however little that costs here."""
    if window.n_steps < 20:
        return
    for file, loop in step_loops(window):
        for node in calls(loop):
            at = Location(file, node.lineno)
            inner = below_function(around(window, at))
            inside = inner[next((i for i, s in enumerate(inner) if s is loop), 0) + 1:]
            if step_line(window, (at,)) is None or any(isinstance(s, ast.If | ast.Try) for s in inside) or any(node in ast.walk(part) for part in header(loop)):
                continue
            function = function_named(window, file, call_name(node))
            what = to_file(node) or next((w for c in calls(function) if (w := to_file(c)) and not conditional(function, c)), None)
            if what is None:
                continue
            yield Finding("per-step-sync", "certain", "note", f"{what}() is called at every step", f"Write every n steps or once an epoch: {quoted(window, at, 'this line')}.",
                          Where.at(at), evidence=(Evidence(f"it stands unconditionally in the loop that made {window.n_steps} steps", "time", float(window.n_steps)),))
            return


def to_file(call: ast.Call) -> str | None:
    """The name of a call that writes a file: `torch.save`, `json.dump`, `open(path, "a")`."""
    name = call_name(call)
    owner = ast.unparse(call.func) if isinstance(call.func, ast.Attribute) else name
    if name == "open":
        mode = next((k.value for k in call.keywords if k.arg == "mode"), call.args[1] if len(call.args) > 1 and isinstance(call.func, ast.Name) else None)
        return owner if isinstance(mode, ast.Constant) and any(c in str(mode.value) for c in "wax+") else None
    return owner if name in FILES and not owner.startswith(("sys.stdout", "sys.stderr")) else None


def conditional(function: ast.AST | None, call: ast.Call) -> bool:
    return any(isinstance(n, ast.If) and any(c is call for c in ast.walk(n)) for n in (ast.walk(function) if function is not None else ()))
