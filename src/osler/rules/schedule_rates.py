"""What the learning rates used say: gone early, zero at first, never reached, far from what was asked, growing without end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, in_turn, loaded, motion, optimizer
from osler.rules.schedule_calls import say
from osler.rules.schedule_lines import culprit, formula
from osler.rules.schedules import (
    Rhythm,
    Schedule,
    parts,
    rate_lines,
    rates,
    rhythm,
    steps_taken,
)
from osler.rules.script import (
    LOOPS,
    around,
    calls,
    function_around,
    place,
    trains,
    tree,
    words,
)
from osler.rules.values import argument, call_at, decided, keyword_line

PATIENT = re.compile(r"best|patien|plateau|bad_|no_improv|stall|stagn|wait", re.I)
SEARCH = re.compile(r"lr_?find|find_?lr|range_?test|lr_?test|lr_?sweep|lr_?search", re.I)


def solved(window: Window, loss_share: float = 0.1, accuracy: float = 0.97) -> bool:
    """There was nothing left to learn: the loss nearly gone, or nearly every training answer right."""
    line = curve(window)
    seen = window.calls["accuracy"][(window.calls["phase"] == 0) & np.isfinite(window.calls["accuracy"])]
    done = len(seen) > 0 and float(np.mean(seen[-max(5, len(seen) // 10):])) > accuracy
    return done or (line is not None and line.one_sign and line.late <= loss_share * line.start)


def gone(window: Window, every: Sequence[Schedule], pace: Rhythm | None, *, tiny: float, share: float, least: int) -> Iterator[Finding]:
    """The rate is a thousandth of its peak, or zero, for a good part of the run: at its end or at its beginning."""
    step, lr = rates(window)
    total = window.n_steps
    if not one_rate(window, every):
        return
    if len(lr) < 10 or total < least or in_turn(window) or not lr.max() > 0:
        if len(lr) >= 10 and not lr.max() > 0:
            yield from _all_zero(window, every, lr)
        return
    active = [s for s in every if s.calls and int(window.steps["optimizer"][-1]) in s.drives]
    if any(s.fact.get("metric") for s in active) and not (len(active) == 1 and _hasty(window, active[0])):
        return
    peak = float(lr.max())
    low = lr <= tiny * peak
    high = np.flatnonzero(~low)
    last, end = int(step[-1]), int(window.steps["step"][-1])
    late, early = step[high[-1] + 1:], step[: high[0]]  # watched steps after the last and before the first rate that counts
    if len(late) >= 4 and last >= 0.6 * end and end - late[0] >= share * end:
        at, fix, also = culprit(window, active, pace)
        severity = "note" if solved(window) or (not active and watches(window)) else "harmful"
        yield say(f"The learning rate is gone from step {late[0]} of {end} on: {lr[-1]:.2g}, after a peak of {peak:.3g}", fix, at,
                  [Evidence(f"the last {1 - late[0] / end:.0%} of the steps used less than {tiny:g} of the peak rate", "steps/lr", float(lr[-1]), tiny * peak, len(lr))],
                  severity, "certain", also=also, first=int(late[0]), last=end)
    elif len(early) >= 10 and early[-1] >= max(share * end, 20) and lr[: high[0]].max() <= 1e-6 * peak:
        at, fix, also = culprit(window, active, pace)
        yield say(f"The learning rate is zero for the first {early[-1]} of {end} steps", "Let the warm-up rise from its first step on.", at,
                  [Evidence(f"{early[-1]} steps changed nothing", "steps/lr", 0.0, peak, len(lr))], also=also, first=1, last=int(early[-1]))


def watches(window: Window) -> bool:
    """A rate that is cut by hand where a metric stops improving."""
    for at, _ in rate_lines(window):
        inside = around(window, at)
        function = function_around(inside)
        if any(PATIENT.search(ast.unparse(n.test)) for n in inside if isinstance(n, ast.If)) or (function is not None and any(PATIENT.search(w) for w in words(function)) and
                                                                                                 len(list(ast.walk(function))) < 200):
            return True
    return False


def one_rate(window: Window, every: Sequence[Schedule]) -> bool:
    """The first group, which is what is recorded, speaks for the others."""
    made = optimizer(window)
    groups = [g.get("lr") for g in (made.get("groups") if made is not None else None) or ()]
    if len(groups) < 2:
        return True
    last = [s.fact.get("lr_last") or [] for s in every if s.calls and made is not None and made.get("index") in s.drives]
    return bool(last) and all(isinstance(v, int | float) and v <= 1e-3 * max(float(g or 0.0), 1e-30) for v, g in zip(last[-1], groups, strict=False))


def jitter(window: Window, least: int = 200, ratio: float = 4.0, size: float = 0.25) -> Iterator[Finding]:
    """The loss jumps about in the first steps, which no warm-up softens: scatter about a running median, so that a steep fall is none."""
    line, (_, lr) = curve(window, least), rates(window)
    if line is None or not line.one_sign or len(lr) < 10 or line.n < least or lr[0] < 0.5 * lr.max():
        return
    width = 7
    padded = np.pad(line.loss, width, mode="edge")
    trend = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1), axis=1)
    scatter = np.abs(line.loss - trend) / np.maximum(trend, 1e-12)
    head = max(20, line.n // 10)
    early, rest = float(np.median(scatter[:head])), float(np.median(scatter[line.n // 5:]))
    peak = float(line.loss[:head].max())
    if early < max(size, ratio * rest) or peak < 1.5 * line.first:
        return
    made = optimizer(window)
    betas = ((made.get("defaults") or {}).get("betas") if made is not None else None) or [0.9, 0.999]
    yield say(f"The loss jumps about by {early:.0%} in its first {head} steps, and by {rest:.0%} later", f"Let the rate rise over the first steps (Adam's averages of squares need about {1 / (1 - float(betas[1])):.0f}).",
              made.at if made is not None else None, [Evidence(f"median distance from a running median, {early / max(rest, 1e-12):.2g} times that of later steps", "steps/loss", early, ratio * rest, line.n)],
              "note", "measured", first=1, last=head)


def _hasty(window: Window, s: Schedule) -> bool:
    return int(s.attrs.get("patience") or 0) <= 1 and not solved(window, 0.5)


def _all_zero(window: Window, every: Sequence[Schedule], lr: np.ndarray) -> Iterator[Finding]:
    made = optimizer(window)
    asked = (made.get("defaults") or {}).get("lr") if made is not None else None
    if not isinstance(asked, int | float) or asked <= 0:
        return
    at, fix, also = culprit(window, [s for s in every if s.calls or s.steps], rhythm(window))
    yield say(f"The learning rate is zero in every step, although the optimizer was given {asked:.3g}", fix, at,
              [Evidence(f"{len(lr)} steps changed nothing", "steps/lr", 0.0, float(asked), len(lr))], "fatal", also=also)


def unfinished(window: Window, every: Sequence[Schedule], pace: Rhythm | None, least: int = 40) -> Iterator[Finding]:
    """The rate still rises when the run ends, and has not come to half of what it is meant to be."""
    step, lr = rates(window)
    if len(lr) < 10 or window.n_steps < least or not window.final or in_turn(window) or searching(window) or window.facts("exception"):
        return
    active = [s for s in every if s.calls and int(window.steps["optimizer"][-1]) in s.drives]
    made = optimizer(window)
    asked = (made.get("defaults") or {}).get("lr") if made is not None else None
    base = active[-1].base if active and not active[-1].fact.get("metric") and active[-1].kind not in ("OneCycleLR", "CyclicLR") else asked
    if not isinstance(base, int | float) or not base > 0:
        return
    half = np.interp(step[-1] / 2, step, lr)
    rising = lr[-1] >= 0.999 * lr.max() and half <= 0.7 * lr[-1] and (np.diff(lr) >= 0).mean() > 0.95 and lr[0] < 0.3 * lr[-1]
    if not rising or lr[-1] > 0.5 * base:
        return
    where: Location | None = None
    pieces = [p for s in active for p in (s, *parts(window, s))]
    for s in pieces:
        where = where or _warm_line(window, s)
    at, _, also = culprit(window, active, pace)
    yield say(f"The warm-up is longer than the run: the learning rate came to {lr[-1]:.3g} of {base:.3g} in {window.n_steps} steps",
              "Shorten the warm-up to a small part of the run, or step it as often as it was planned for.", where or at,
              [Evidence(f"the rate rose from {lr[0]:.3g} to {lr[-1]:.3g} until the last step", "steps/lr", float(lr[-1]), 0.5 * base, len(lr))], also=also)


def first_stage(window: Window, s: Schedule, least: int = 40) -> Iterator[Finding]:
    """A reduced rate at the start that lasts for the whole run."""
    pieces = parts(window, s)
    piece = pieces[0] if pieces and s.kind == "SequentialLR" else s
    limit = min(s.attrs.get("milestones") or [0]) if piece is not s else float(s.attrs.get("total_iters") or 0)
    _, lr = rates(window, s.drives)
    base = piece.base
    if piece.kind not in ("ConstantLR", "LinearLR") or not s.calls or s.calls >= limit or s.steps < least or len(lr) < 10 or not window.final or not base > 0 or searching(window):
        return
    if lr.max() > 0.5 * base or window.facts("exception"):
        return
    call = call_at(window, s.at, s.kind)
    given = argument(call, "milestones", 2) if piece is not s else argument(call, "total_iters", 2 if s.kind == "ConstantLR" else 3)
    at = decided(window, s.at, given) if s.at is not None and given is not None else s.at
    yield say(f"The reduced rate at the start lasts {limit:.0f} calls, and the run made {s.calls}: {lr.max():.3g} at most, of {base:.3g}",
              "Shorten the first stage, or step the scheduler as often as it was planned for.", at,
              [Evidence(f"{s.calls} of {limit:.0f} calls", "steps/lr", float(lr.max()), 0.5 * base, s.calls)], also=(s.at, s.step_at))


def _warm_line(window: Window, s: Schedule) -> Location | None:
    """Where the length of the warm-up was written."""
    if s.framework:
        return keyword_line(window, "warmup_steps", "num_warmup_steps", "warmup_ratio", "warmup")
    call = call_at(window, s.at, s.kind)
    if s.kind == "LinearLR" and call is not None and s.at is not None:
        return decided(window, s.at, argument(call, "total_iters", 3))
    named = next((k for k in s.numbers if re.search("warm|ramp", k, re.I)), None)
    if named is None or s.at is None:
        return None
    for up in (s.at, *map(place, s.fact.get("up") or ())):
        for st in around(window, up)[-1:]:
            for c in calls(st):
                given = next((k.value for k in c.keywords if k.arg == named), None)
                if given is not None and up is not None:
                    return decided(window, up, given)
    at = place(s.fact.get("function")) or s.at
    return decided(window, at, ast.copy_location(ast.Name(named, ast.Load()), ast.Pass(lineno=at.line, col_offset=0)))


def absolute(window: Window, every: Sequence[Schedule], small: float = 0.02, fall: float = 0.15, least: int = 40) -> Iterator[Finding]:
    """A rate function returns a rate where a factor is meant, so the rate is far below what the optimizer was given."""
    _, lr = rates(window)
    line, move = curve(window), motion(window)
    if len(lr) < 10 or window.n_steps < least or line is None or not line.one_sign or line.fall > fall or loaded(window):
        return
    for s in every:
        if s.kind not in ("LambdaLR", "MultiplicativeLR") or not s.calls or not s.base > 0 or s.base == 1.0 or lr.max() > small * s.base:
            continue
        if lr[-1] >= 0.999 * lr.max() and lr[0] < 0.3 * lr[-1]:
            continue
        if move is not None and float(np.median(move.ratio)) > 3e-4:
            continue
        at = formula(window, s) or s.at
        yield say(f"{s.kind} multiplies the base rate {s.base:.3g} by {lr.max() / s.base:.2g}: the rate never exceeds {lr.max():.2g}",
                  "Return the factor by which the optimizer's rate is multiplied, not the rate itself.", at,
                  [Evidence(f"peak rate {lr.max():.3g} against {s.base:.3g} given to the optimizer", "steps/lr", float(lr.max()), small * s.base, len(lr)),
                   Evidence(f"the loss fell by {line.fall:.1%}", "steps/loss", line.fall, fall, line.n)], also=(s.at,))


def growing(window: Window, every: Sequence[Schedule], least: int = 20) -> Iterator[Finding]:
    """The rate grows far beyond what was asked, and the loss goes with it."""
    step, lr = rates(window)
    if len(lr) < 10 or window.n_steps < least or in_turn(window) or searching(window):
        return
    made = optimizer(window)
    asked = (made.get("defaults") or {}).get("lr") if made is not None else None
    active = [s for s in every if s.calls and int(window.steps["optimizer"][-1]) in s.drives]
    lost = nonfinite.first(window, "loss", "gradient", "parameter")
    until = lr[step <= lost.step + 1] if lost is not None else lr
    line = curve(window)
    if not isinstance(asked, int | float) or asked <= 0 or len(until) < 5:
        return
    worse = lost is not None or (line is not None and line.one_sign and line.late > 0.8 * line.start
                                 and (line.late > 1.5 * line.low or float(line.loss.max()) > 3 * line.start))
    peak = float(until.max())
    if not worse or peak < 5 * asked or peak < 5 * float(until[0]):
        return
    if any(s.kind in ("OneCycleLR", "CyclicLR") for s in active) and peak < 30 * asked:
        return
    if not active and not rate_lines(window):
        return
    at, _, also = culprit(window, active, None)
    if active and active[-1].kind in ("OneCycleLR", "CyclicLR") and active[-1].at is not None:
        call = call_at(window, active[-1].at, active[-1].kind)
        at = decided(window, active[-1].at, argument(call, "max_lr", 1 if active[-1].kind == "OneCycleLR" else 2))
    elif active and active[-1].kind in ("ExponentialLR", "StepLR", "MultiStepLR", "CosineAnnealingLR"):
        at = active[-1].at
    yield say(f"The learning rate grows from {until[0]:.3g} to {peak:.3g}, and the loss is lost with it",
              "Check the direction and size of the schedule: decay factors are below 1, and the peak is near the rate that works without a schedule.", at,
              [Evidence(f"the rate reached {peak / asked:.3g} times what the optimizer was given ({asked:.3g})", "steps/lr", peak, 5 * asked, len(lr))],
              "fatal" if lost is not None else "harmful", "certain" if any((s.attrs.get("gamma") or 0) > 1 for s in active) else "measured", also=also,
              explains=("infeasible-target", "log-of-zero", "division-by-zero", "singular-gradient"))


def searching(window: Window) -> bool:
    """The script says that it looks for a rate (a range test)."""
    return any(SEARCH.search(text) for text in window.sources.values())


def without_effect(window: Window) -> Iterator[Finding]:
    """A schedule computed by hand that never reaches the optimizer: an attribute it does not read, or a variable of its own."""
    _, lr = rates(window)
    made = window.facts("optimizer")
    if len(lr) < 20 or not len(made) or lr.max() != lr.min() or not window.final:
        return
    for f in made:
        at = f.at
        module = tree(window, at.file) if at is not None else None
        if sum(g.at == at for g in made) > 1:
            continue
        if at is None or module is None or steps_taken(window).get(int(f["index"]), 0) < 20:
            continue
        names = {t.id if isinstance(t, ast.Name) else t.attr for n in ast.walk(module) if isinstance(n, ast.Assign) and n.lineno <= at.line <= (n.end_lineno or n.lineno)
                 for t in n.targets if isinstance(t, ast.Name | ast.Attribute)}
        text = window.sources.get(at.file, "")
        for n in ast.walk(module):
            if not isinstance(n, ast.Assign | ast.AugAssign):
                continue
            target = n.targets[0] if isinstance(n, ast.Assign) else n.target
            holder = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
            attribute = isinstance(target, ast.Attribute) and target.attr in ("lr", "learning_rate") and _called(holder) in names
            default = isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr" \
                and isinstance(holder, ast.Attribute) and holder.attr == "defaults"
            spare = isinstance(target, ast.Name) and "param_groups" not in text and _own_rate(window, at, target.id, n)
            if attribute or default or spare:
                what = ast.unparse(target)
                yield say(f"`{what}` is changed, but the optimizer does not read it: the rate stayed at {lr[0]:.3g}",
                          'Set the rate of each group: for group in optimizer.param_groups: group["lr"] = new_rate.', Location(at.file, n.lineno, at.function),
                          [Evidence(f"the rate was {lr[0]:.3g} in all {len(lr)} steps looked at", "steps/lr", float(lr[0]), None, len(lr))], also=(at,))
                return


def _called(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _own_rate(window: Window, at: Location, name: str, statement: ast.stmt) -> bool:
    """The variable that gave the optimizer its rate is changed again inside the training loop, after the optimizer was built."""
    call = call_at(window, at)
    given = argument(call, "lr", 1)
    if not isinstance(given, ast.Name) or given.id != name or statement.lineno <= at.line:
        return False
    here = Location(at.file, statement.lineno)
    loops = [n for n in around(window, here) if isinstance(n, LOOPS) and trains(n)]
    return bool(loops) and not any(n.lineno <= at.line <= (n.end_lineno or 0) for n in loops)
