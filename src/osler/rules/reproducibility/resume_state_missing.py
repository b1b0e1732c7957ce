from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import scaling
from osler.rules.script import FUNCTIONS, around, call_name, calls, function_around, tree, words

RESUMES = re.compile(r"resum|restart|preempt|interrupt|crash|recover|start_?(epoch|step|iter)|continu\w* (the )?(train|run|from)|last_?(ckpt|checkpoint)|pick\w* up", re.I)
COUNTERS = re.compile(r"^(epoch|step|iter|iteration|global_step|it|last_epoch|next_epoch|start_epoch|n_iter|steps|epochs|done|progress|t)$", re.I)
NOT_RESUMED = re.compile(r"fine.?tun|transfer|pre.?train|init(ial)?_?(state|weights)|warm.?start|best_?(state|model|weights)|rewind|teacher|target_net|snapshot_ensemble|swa|distill|fold", re.I)
NAMES = {"optimizer": re.compile(r"opt(im|imizer)?s?(_?\w{0,2})?$|^o\d?$|^opt", re.I), "scheduler": re.compile(r"sched|^lr_s|^s$", re.I), "scaler": re.compile(r"scaler", re.I),
         "average": re.compile(r"ema|shadow|averag|swa", re.I)}


@rule("resume-state-missing", "reproducibility")
def check(window: Window, *, later_steps: int = 3) -> Iterator[Finding]:
    """Training resumes without the state of its optimizer, scheduler, scaler or average.

    **What it is.** A checkpoint brings the weights back and the epoch to go on from, but the optimizer starts with empty moments, the
    schedule at its first learning rate, the loss scale at its initial value, the moving average from scratch: because the file does not hold them,
    or holds them and nobody loads them, or a new optimizer is built after the load.

    **How it is seen.** Weights of the whole model were loaded, the script says that it resumes (a counter from the checkpoint, its words), and
    at least `later_steps` steps followed with a stateful optimizer into which no state was loaded since it was built; likewise for
    schedulers and scalers. What files hold was recorded when they were written and read.

    **Why it matters.** Adam's first steps without moments are as large as the learning rate allows: the loss jumps. A schedule that starts
    anew warms up twice or never decays.

    **What to do.** Save and load `state_dict()` of all of them, and of the generators where runs must match.

    **When this is wrong.** Fine-tuning on purpose takes weights only; nothing is said where nothing speaks of resuming. SGD without momentum
    has no state.

    **Source.** PyTorch tutorial on saving a general checkpoint; pytorch-lightning and fairseq issues on resumed runs.
    """
    loads = [f for f in window.facts("load-state-dict") if f.at is not None and f.get("matched") == f.get("expected") and f.get("expected")]
    for load in loads:
        if window.n_steps - load.step < later_steps or not resumes(window, load):
            continue
        missing = list(states(window, load))
        if missing:
            _, title, fix, at, text = missing[0]
            place = at or load.at
            yield Finding("resume-state-missing", "certain", "harmful", title, fix, Where.at(place, also=tuple(str(x) for x in (load.at, saved_line(window)) if x is not None and x != place)),
                          first_step=load.step, evidence=(Evidence(text, "load-state-dict", None, None, 1),), explains=("loss-spikes", "lr-schedule", "lr-too-high", "amp-scaler-not-updated", "shadow-weights-stale"))
            return


def block(window: Window, at: Location) -> ast.AST | None:
    """The function that holds a line, else the statements of the module near it."""
    function = function_around(around(window, at))
    if function is not None:
        return function
    module = tree(window, at.file)
    if module is None:
        return None
    near = [s for s in module.body if at.line - 12 <= s.lineno <= at.line + 12 and not isinstance(s, (*FUNCTIONS, ast.ClassDef))]
    return ast.Module(near, [])


def resumes(window: Window, load: Fact) -> bool:
    """The text around the load, or a counter that it takes from the checkpoint, says that a run goes on."""
    at = load.at
    if at is None:
        return False
    here = block(window, at)
    first = getattr(here, "lineno", None) or max(1, at.line - 6)
    last = getattr(here, "end_lineno", None) or at.line + 6
    text = "\n".join(window.line(at.file, n) for n in range(max(1, min(first, at.line - 6)), min(last, at.line + 12) + 1))
    line = window.line(at.file, at.line)
    if NOT_RESUMED.search(line):
        return False
    counter = here is not None and any(taken(n) for n in ast.walk(here))
    module = tree(window, at.file)
    if not counter and module is not None:
        sources = {w for c in calls(here, "load_state_dict") for a in c.args for w in words(a)} if here is not None else set()
        counter = any(taken(n) and sources & words(n) for n in ast.walk(module))
    if NOT_RESUMED.search(text) and not RESUMES.search(text):
        return False
    if counter and uses_counter(module):
        return True
    again = len({f.step for f in window.facts("load-state-dict") if f.at == at})
    if not window.facts("file-read") and (again > 1 or not RESUMES.search(re.sub(r"restart\w*", "", text, flags=re.I))):
        return False  # the same weights for every trial or fold
    return bool(RESUMES.search(text))


def taken(n: ast.AST) -> bool:
    """`checkpoint["epoch"]`, `ck.get("step", 0)`."""
    if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Constant) and isinstance(n.slice.value, str):
        return bool(COUNTERS.match(n.slice.value))
    return isinstance(n, ast.Call) and call_name(n) == "get" and bool(n.args) and isinstance(n.args[0], ast.Constant) and isinstance(n.args[0].value, str) and bool(COUNTERS.match(n.args[0].value))


def uses_counter(module: ast.Module | None) -> bool:
    """The counter goes into a loop or a call or is kept, rather than only printed."""
    if module is None:
        return False
    printed = {id(x) for c in calls(module, "print", "info", "format") for x in ast.walk(c)}
    quoted = {id(x) for j in ast.walk(module) if isinstance(j, ast.JoinedStr) for x in ast.walk(j)}
    return any(taken(n) and id(n) not in printed and id(n) not in quoted and isinstance(getattr(n, "ctx", ast.Load()), ast.Load) for n in ast.walk(module))


def states(window: Window, load: Fact) -> Iterator[tuple[str, str, str, Location | None, str]]:
    """(kind, title, fix, line, evidence) of what training goes on with and did not get back."""
    restored = window.facts("state-loaded")
    late = [f for f in window.facts("optimizer") if f.step >= load.step or near(f, load)]
    working = {int(i) for i in set(window.steps["optimizer"][window.steps["step"] > load.step].tolist())}
    fresh = [f for f in (late or window.facts("optimizer")) if f.get("index") in working and stateful(f)]
    if load.step and not late:
        fresh = []  # the optimizer that was there all along still has its moments
    held = holds(window, "optimizer")
    back = [f for f in restored if f.get("what") == "optimizer"]
    if fresh:
        made = max(fresh, key=lambda f: f.t)
        after = [f for f in back if f.t >= made.t - 1e-9]
        if not back and not names_loaded(window, "optimizer", load):
            title = "Training resumes with an optimizer whose state was not loaded" + (", although the checkpoint holds it" if held else "")
            yield "optimizer", title, "Save optimizer.state_dict() in the checkpoint and load it after the model's weights.", None, \
                f"weights loaded at step {load.step}; {made.get('class')} built at {made.at} stepped on without load_state_dict; files hold {', '.join(kinds(window)) or 'weights only'}"
        elif back and not after and made.at is not None:
            yield "optimizer", "A new optimizer is built after the state was loaded into the old one", "Build the optimizer before its state is loaded.", made.at, \
                f"optimizer state loaded at {back[-1].at}, {made.get('class')} built anew at {made.at}"
    plans = [f for f in window.facts("scheduler") if (f.step >= load.step or near(f, load))]
    running = [f for f in plans if f.get("optimizer") is None or f.get("optimizer") in working]
    if running and not any(f.get("what") == "scheduler" for f in restored) and not names_loaded(window, "scheduler", load) and (load.step == 0 or late or holds(window, "scheduler")):
        made = running[0]
        if made.at is not None and not positioned(window, made):
            yield "scheduler", "Training resumes with a schedule that starts from its beginning", "Save scheduler.state_dict() and load it (or pass last_epoch).", None, \
                f"{made.get('class')} built at {made.at}; no load_state_dict of a scheduler, no last_epoch"
    for f in scaling.active(window):
        again = int(f.get("instances") or 1) >= 2 and (f.get("scales") or 0)
        if again and load.step and not any(r.get("what") == "scaler" for r in restored) and not names_loaded(window, "scaler", load):
            yield "scaler", "Training resumes with a fresh gradient scaler: its scale starts from the beginning", "Save scaler.state_dict() and load it.", None, \
                f"{f.get('instances')} scalers built at {f.at}, none given a state"
    average = remade_average(window, load)
    if average is not None:
        yield "average", f"Training resumes with a new moving average ({average}) that the checkpoint does not bring back", "Save the average's state and load it.", None, \
            f"{average} is updated in training and is no part of what is loaded"


def near(f: Fact, load: Fact, seconds: float = 0.5) -> bool:
    """Built just before the load, in the same breath: after the last step of the run before."""
    return f.step == load.step and f.t <= load.t and load.t - f.t < 60 * seconds


def stateful(f: Fact) -> bool:
    defaults: dict[str, Any] = f.get("defaults") or {}
    return f.get("class") != "SGD" or bool(defaults.get("momentum"))


def kinds(window: Window) -> list[str]:
    return sorted({str(k) for f in (*window.facts("file-saved"), *window.facts("file-read")) for k in f.get("keys") or ()})[:8]


def holds(window: Window, kind: str) -> bool:
    return any(kind in (f.get("what") or {}).values() for f in window.facts("file-read"))


def names_loaded(window: Window, kind: str, load: Fact) -> bool:
    """Whether the text near the load, or anywhere, gives a state to something of that kind (loops over names included)."""
    at = load.at
    module = tree(window, at.file) if at is not None else None
    if module is None or at is None:
        return False
    pattern = NAMES[kind]
    executed = {f.at.line for f in window.facts("state-loaded") if f.at is not None}
    for c in calls(module, "load_state_dict"):
        owner = scaling.last(c.func.value) if isinstance(c.func, ast.Attribute) else ""
        if owner and pattern.search(owner) and (kind == "average" or c.lineno in executed or kind == "scheduler"):
            return True
    here = block(window, at)
    for loop in ast.walk(here) if here is not None else ():
        if isinstance(loop, ast.For) and any(True for _ in calls(loop, "load_state_dict")):
            named = {n.value for n in ast.walk(loop.iter) if isinstance(n, ast.Constant) and isinstance(n.value, str)} | words(loop.iter)
            if any(pattern.search(w) for w in named):
                return True
    return any(isinstance(s, ast.Assign) and any(pattern.search(scaling.last(t)) for t in s.targets) and isinstance(s.value, ast.Subscript) and isinstance(s.value.slice, ast.Constant)
               and isinstance(s.value.slice.value, str) and pattern.search(s.value.slice.value) for s in ast.walk(module))


def positioned(window: Window, made: Fact) -> bool:
    """The schedule is told where it stands: `last_epoch=`, or stepped forward in a loop of its own."""
    at = made.at
    module = tree(window, at.file) if at is not None else None
    if module is None:
        return True
    if any(k.arg == "last_epoch" and not (isinstance(k.value, ast.UnaryOp) or (isinstance(k.value, ast.Constant) and k.value.value in (-1, None))) for c in calls(module) for k in c.keywords):
        return True
    for loop in ast.walk(module):
        if isinstance(loop, ast.For) and len(loop.body) == 1 and not any(call_name(c) in ("backward", "zero_grad") for c in calls(loop)) \
                and any(call_name(c) == "step" and isinstance(c.func, ast.Attribute) and NAMES["scheduler"].search(scaling.last(c.func.value)) for c in calls(loop)):
            return True
    return any(isinstance(s, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr in ("last_epoch", "_step_count") for t in s.targets) for s in ast.walk(module))


def remade_average(window: Window, load: Fact) -> str | None:
    """A moving average that is updated in training while the state that is loaded knows nothing of it."""
    at = load.at
    module = tree(window, at.file) if at is not None else None
    if module is None or not load.step:
        return None
    pattern = re.compile(r"(^|_)(ema|shadow|averaged?|swa)(_|$|\w*model)", re.I)
    used = {scaling.last(c.func.value) for c in calls(module, "update", "update_parameters", "step") if isinstance(c.func, ast.Attribute)}
    names = sorted(w for w in used if pattern.search(w))
    known = {str(k) for f in (*window.facts("file-saved"), *window.facts("file-read")) for k in f.get("keys") or ()}
    if not names or any(pattern.search(k) for k in known) or names_loaded(window, "average", load) or not known:
        return None
    return names[0]


def saved_line(window: Window) -> Location | None:
    found = window.facts("file-saved")
    return found[0].at if found else None
