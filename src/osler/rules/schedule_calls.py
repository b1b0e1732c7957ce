"""Facts about how schedulers are called: never, on the wrong optimizer, at the wrong rate, rebuilt, two against each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.window import Window
from osler.rules.schedules import (
    Rhythm,
    Schedule,
    horizon,
    length_argument,
    rates,
    step_line,
    steps_taken,
    unit,
)
from osler.rules.script import LOOPS, around, calls, loop_heads, place, root, targets, tree

OVERWRITES = ("LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts")
"""Schedulers that set the rate from their own formula, whatever it was before."""
RECEIVER = re.compile(r"sched|lr_|warm|plateau|anneal|cosine|decay|^sch$|^ls$", re.I)


def say(title: str, fix: str, at: Location | None, evidence: Sequence[Evidence], severity: str = "harmful", certainty: str = "certain",
        treatment: str | None = None, also: Sequence[Location | None] = (), first: int | None = None, last: int | None = None, explains: tuple[str, ...] = ()) -> Finding:
    more = tuple(str(a) for a in also if a is not None and a != at)
    return Finding("lr-schedule", certainty, severity, title, fix, Where.at(at, also=more), evidence=tuple(evidence), treatment=treatment, first_step=first, last_step=last,
                   explains=explains)


def never_stepped(window: Window, s: Schedule, pace: Rhythm | None, least: int = 20) -> Iterator[Finding]:
    """Built, and ``step`` never called, while its optimizer trained."""
    if s.calls or s.fact.get("custom") or not window.final or s.steps < least or window.facts("exception") or s.framework:
        return
    text = stepping_lines(window, s)
    if (pace is None and s.steps < 2 * least) or (pace is not None and pace.epochs < 2 and not _per_batch(window, s, pace)):
        return
    _, lr = rates(window, s.drives)
    used = float(lr[-1]) if len(lr) else float("nan")
    base = s.base
    stuck = used < 0.5 * base
    at = missing_line(window, s, pace)
    yield say(f"{s.kind} is never stepped: the learning rate stayed at {used:.3g} for {s.steps} steps", "Call scheduler.step() "
              + ("after every optimizer step." if _per_batch(window, s, pace) else "once per epoch, after the optimizer's steps."), at,
              [Evidence(f"no call of step() on the {s.kind} built at {s.at}; its optimizer stepped {s.steps} times", None, 0, 1, s.steps),
               *([Evidence(f"the schedule starts at {used / base:.3g} of the base rate {base:.3g} and waits for its warm-up", "steps/lr", used, base, s.steps)] if stuck else [])],
              severity="note" if text else "harmful", also=(s.at,))


def _per_batch(window: Window, s: Schedule, pace: Rhythm | None) -> bool:
    if pace is None:
        return True
    value, at = length_argument(window, s)
    planned = horizon(s)
    return unit(window, at, value) == "batch" or s.kind == "OneCycleLR" or (planned is not None and planned > 2 * pace.epochs)


def stepping_lines(window: Window, s: Schedule) -> list[int]:
    """Lines that call ``step`` on something that is called like a scheduler, or like this one."""
    names = set()
    for statement in around(window, s.at)[-1:]:
        names |= targets(statement)
    found = []
    for file in window.sources:
        for call in calls(tree(window, file), "step"):
            name = root(call.func.value) if isinstance(call.func, ast.Attribute) else None
            if name is not None and (name in names or RECEIVER.search(name.split(".")[-1])):
                found.append(call.lineno)
    return found


def missing_line(window: Window, s: Schedule, pace: Rhythm | None) -> Location | None:
    """Where the missing call belongs: after the optimizer's step, or after the loop over batches."""
    at = step_line(window)
    if at is None:
        return s.at
    if _per_batch(window, s, pace):
        return at
    heads = loop_heads(window, at)
    if len(heads) >= 2:
        return Location(at.file, heads[-1].end_lineno or at.line, at.function)
    statements = around(window, at)
    name = next((n.name for n in reversed(statements) if isinstance(n, ast.FunctionDef)), None)
    for call in calls(tree(window, at.file), *([name] if name else [])):
        if name and any(isinstance(n, LOOPS) for n in around(window, Location(at.file, call.lineno))):
            return Location(at.file, call.lineno)
    return at


def foreign_optimizer(window: Window, s: Schedule, least: int = 20) -> Iterator[Finding]:
    """The scheduler sets the rate of an optimizer that does not step, while another one moves the same parameters."""
    if s.calls < 2 or not len(window.steps):
        return
    made = {int(f["index"]): f for f in window.facts("optimizer")}
    own = {u for i in s.drives if i in made for u in made[i].get("uids") or ()}
    taken = steps_taken(window)
    others = [i for i, f in made.items() if i not in s.drives and taken.get(i, 0) >= least and len(own & set(f.get("uids") or ())) >= 0.3 * max(len(own), 1)]
    if not others or not own:
        return
    rows = window.steps
    driven = rows["step"][np.isin(rows["optimizer"], s.drives)]
    newest = others[-1]
    theirs = rows["step"][rows["optimizer"] == newest]
    last_call = float(s.marks[-1, 0]) if len(s.marks) else 0.0
    if s.steps == 0:
        at, what = s.at, f"its optimizer never stepped; the one built at {made[newest].at} took {taken[newest]} steps"
    elif len(driven) and len(theirs) and theirs[0] > driven[-1] and last_call > theirs[0] + 0.3 * (theirs[-1] - theirs[0]):
        at, what = made[newest].at, f"its optimizer stopped at step {int(driven[-1])}; the one built at {made[newest].at} has trained since"
    else:
        return
    yield say(f"{s.kind} is attached to another optimizer than the one that trains", "Build the scheduler on the optimizer whose step() is called, after that one is built.", at,
              [Evidence(f"{what}, and {s.calls} calls of scheduler.step() changed a rate nobody uses", None, s.calls, None, s.calls)], also=(s.at, made[newest].at))


def wrong_argument(window: Window, s: Schedule) -> Iterator[Finding]:
    """A loss handed to a scheduler that takes it for the epoch, or an epoch to one that takes it for the metric."""
    given = s.marks[:, 2]
    given = given[np.isfinite(given)]
    if len(given) < 3:
        return
    if s.fact.get("metric"):
        if np.all(np.diff(given) == 1) and given[0] in (0, 1):
            yield say(f"ReduceLROnPlateau is given the epoch number ({given[0]:.0f}, {given[1]:.0f}, {given[2]:.0f}, …) as its metric",
                      "Pass the validation loss: scheduler.step(val_loss).", s.step_at,
                      [Evidence(f"{len(given)} calls of step() got consecutive whole numbers", None, float(given[-1]), None, len(given))])
        return
    falls = np.diff(given) < 0
    if falls.sum() >= 2 and falls.mean() >= 0.1 and np.any(given != np.round(given)):
        yield say(f"{s.kind}.step() is given a loss and takes it for the epoch number ({given[0]:.3g}, {given[-1]:.3g})",
                  "Call scheduler.step() without an argument; only ReduceLROnPlateau takes a metric.", s.step_at,
                  [Evidence(f"{len(given)} calls got numbers that fall and are not whole", None, float(given[-1]), None, len(given))])


def rebuilt(window: Window, every: Sequence[Schedule], least: int = 3) -> Iterator[Finding]:
    """The same line builds a scheduler for the same optimizer again and again, each used for a small part of its length."""
    lines: dict[tuple[str, int | None], list[Schedule]] = {}
    for s in every:
        lines.setdefault((str(s.at), s.fact.get("optimizer")), []).append(s)
    for group in lines.values():
        lengths = [horizon(s) for s in group]
        used = [s for s in group[:-1] if s.calls]
        if len(group) < least or group[0].fact.get("optimizer") is None or len(used) < least - 1:
            continue
        known = [c / h for s, h in zip(group, lengths, strict=True) if h and (c := s.calls)]
        if known and float(np.median(known)) > 0.5:
            continue
        if not known and max(s.calls for s in used) > 3:
            continue
        if not isinstance(group[0].at, Location) or not any(isinstance(n, LOOPS) for at in (group[0].at, *map(place, group[0].fact.get("up") or ()))
                                                            for n in around(window, at)):
            continue
        yield say(f"{group[0].kind} is built anew {len(group)} times for one optimizer, so its schedule starts over each time",
                  "Build the scheduler once, before the loop over epochs.", group[0].at,
                  [Evidence(f"{len(group)} schedulers from this line, stepped {int(np.median([s.calls for s in used]))} times each (median)"
                            + (f", of {lengths[0]:.0f} planned" if lengths[0] else ""), None, len(group), least, len(group))])


def fighting(window: Window, every: Sequence[Schedule]) -> Iterator[Finding]:
    """One scheduler sets the rate from its own formula, and so takes back what another one did."""
    for over in every:
        if over.kind not in OVERWRITES or over.calls < 4 or not len(over.marks):
            continue
        for other in every:
            if other is over or not set(other.drives) & set(over.drives) or other.calls < 2 or (other.kind in OVERWRITES and other.fact.get("number") < over.fact.get("number")):
                continue
            changed, undone = _undone(over, other)
            lost = _without_effect(over, other)
            if not lost and (changed < 1 or undone < 0.7 * changed):
                continue
            late, early = sorted((over, other), key=lambda s: -(s.at.line if s.at else 0))
            yield say(f"{over.kind} and {other.kind} set the learning rate of one optimizer against each other",
                      "Use one schedule, or combine them with SequentialLR or ChainedScheduler.", late.at,
                      [Evidence(f"{undone} of {changed} changes made by {other.kind} were taken back by the next step of {over.kind}" if changed else
                                f"{other.kind} is over after {other.calls} calls, and the rate is still at its peak: each step of {over.kind} sets it anew", "steps/lr",
                                undone, 0.7 * changed, changed or other.calls)],
                      also=(early.at, other.step_at, over.step_at))
            return


def _undone(over: Schedule, other: Schedule) -> tuple[int, int]:
    """Changes of the rate by ``other``, and how many ``over`` took back at its next call."""
    at, lr = over.marks[:, 0], over.marks[:, 1]
    changed = undone = 0
    for step, rate, _ in other.marks:
        before, after = np.searchsorted(at, step, "left") - 1, np.searchsorted(at, step, "right")
        if before < 0 or after >= len(at) or not rate > 0 or not lr[before] > 0 or not lr[after] > 0:
            continue
        reference = lr[min(after - 1, len(lr) - 1)] if after - 1 > before else lr[before]
        if abs(np.log(rate / reference)) > 0.25:
            changed += 1
            undone += bool(abs(np.log(lr[after] / reference)) < 0.5 * abs(np.log(rate / reference)))
    return changed, undone


def _without_effect(over: Schedule, other: Schedule) -> bool:
    """``other`` should have brought the rate down by now, and it is where ``over`` puts it."""
    planned, gamma = horizon(other), other.attrs.get("gamma")
    decays = {"CosineAnnealingLR": planned and 0.7 * planned <= other.calls <= 1.1 * planned, "PolynomialLR": planned and other.calls >= 0.7 * planned,
              "ExponentialLR": isinstance(gamma, int | float) and gamma ** other.calls < 0.3, "StepLR": planned and other.calls >= planned + 2,
              "MultiStepLR": planned and other.calls >= planned + 2}.get(other.kind)
    together = np.isin(over.marks[:, 0], other.marks[:, 0]).mean() > 0.3
    lr = np.r_[over.marks[-1:, 1], other.marks[-1:, 1]]
    return bool(decays and together and over.kind == "LambdaLR" and len(lr) == 2 and lr.min() >= 0.7 * max(over.marks[:, 1].max(), other.marks[:, 1].max()))


def twice(window: Window, s: Schedule, pace: Rhythm | None) -> Iterator[Finding]:
    """Two lines step one scheduler, in turn."""
    lines = [(place(row[0]), int(row[1])) for row in s.fact.get("lines") or ()]
    if len(lines) < 2 or s.early > 2 or s.kind == "SequentialLR" or pace is None or pace.epochs < 3 or s.fact.get("metric"):
        return
    (first, n), (second, m) = lines[:2]
    if first is None or second is None or min(n, m) < 3 or abs(n - m) > 1 or first.file != second.file:
        return
    if _branches(window, first, second):
        return
    gaps = np.diff(s.marks[:, 0])
    if not len(gaps) or not ((gaps == 0).mean() > 0.4 or s.calls > 1.6 * pace.epochs):
        return
    later = max(first, second, key=lambda a: a.line)
    yield say(f"{s.kind} is stepped from two lines, so its schedule runs twice as fast", "Keep one of the two calls.", later,
              [Evidence(f"{n} calls at line {first.line} and {m} at line {second.line}", None, n + m, n, n + m)], also=(first, second))


def consumed(window: Window, s: Schedule, least: int = 4) -> Iterator[Finding]:
    """Stepped through before its optimizer made a single step."""
    _, lr = rates(window, s.drives)
    if s.early < least or s.fact.get("metric") or not s.steps or not len(lr) or window.facts("load-state-dict") or s.step_at is None:
        return
    planned = horizon(s)
    if s.kind == "CosineAnnealingWarmRestarts" or not (lr[0] <= 0.2 * s.base or (planned is not None and s.early >= 0.5 * planned)):
        return
    yield say(f"{s.kind} was stepped {s.early} times before the first optimizer step: training began at {lr[0]:.3g} instead of {s.base:.3g}",
              "Draw the schedule with a copy (another optimizer), or build the scheduler again before training.", s.step_at,
              [Evidence(f"{s.early} of {s.calls} calls came before any step", "steps/lr", float(lr[0]), s.base, s.early)], also=(s.at,))


def doubled(window: Window, every: Sequence[Schedule]) -> Iterator[Finding]:
    """Two like schedulers on one optimizer, and none on another that steps."""
    taken = steps_taken(window)
    driven = {i for s in every for i in s.drives}
    bare = [i for i, n in taken.items() if n >= 20 and i not in driven]
    for i, s in enumerate(every):
        for other in every[:i]:
            if bare and s.kind == other.kind and s.calls and other.calls and s.drives == other.drives and s.at != other.at and taken.get(s.drives[0] if s.drives else -1, 0) >= 20 \
                    and {k: v for k, v in s.attrs.items() if k != "base_lrs"} == {k: v for k, v in other.attrs.items() if k != "base_lrs"}:
                yield say(f"Two {s.kind} schedulers set one optimizer, and another optimizer has none", "Build each scheduler on its own optimizer.", s.at,
                          [Evidence(f"optimizer {s.drives[0]} has two, optimizer {bare[0]} none, of {len(taken)}", None, 2, 1, len(taken))], also=(other.at,))
                return


def _branches(window: Window, first: Location, second: Location) -> bool:
    """The two lines are branches of one decision."""
    for statement in around(window, first):
        if isinstance(statement, ast.If) and statement.orelse and any(st is statement for st in around(window, second)):
            return True
    return False
