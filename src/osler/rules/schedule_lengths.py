"""Lengths of schedules against the calls that were made: batches taken for epochs, epochs for batches, rows for batches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding
from osler.core.window import Window
from osler.rules.schedule_calls import say
from osler.rules.schedules import (
    Rhythm,
    Schedule,
    backwards_taken,
    cadence,
    epoch_loops,
    horizon,
    length_argument,
    parts,
    rates,
    unit,
    warmup,
)
from osler.rules.script import around
from osler.rules.values import decided, keyword_line


def wrong_rate(window: Window, s: Schedule, pace: Rhythm | None) -> Iterator[Finding]:
    """Length and calls do not belong to the same unit: batches against epochs, or batches against accumulated steps."""
    if pace is None or s.calls < 2 or (s.early > 2 and s.early > 0.05 * s.calls) or s.fact.get("metric") or np.isfinite(s.marks[:, 2]).mean() > 0.5:
        return
    inside = parts(window, s)
    for piece in (s, *inside):
        found = list(_mismatch(window, s, piece, pace))
        if found:
            yield found[0]
            return


def _mismatch(window: Window, s: Schedule, piece: Schedule, pace: Rhythm) -> Iterator[Finding]:
    how, planned = cadence(s, pace), horizon(piece)
    cycle = piece.attrs.get("total_size")
    if piece.kind == "CyclicLR" and how == "epoch" and isinstance(cycle, int | float) and cycle >= 4 * s.calls and s.steps >= 3 * pace.epochs:
        yield say(f"CyclicLR has cycles of {cycle:.0f} calls and is stepped once per epoch: {s.calls} calls in {s.steps} steps",
                  "Call scheduler.step() after every optimizer step.", step_place(window, s)[0], [Evidence("its cycles are counted in batches", None, s.calls, cycle, s.calls)], also=(s.at,))
        return
    warm = warmup(piece)
    if planned is None and warm is None:
        return
    length = planned if planned is not None else warm or 0.0
    value, at = length_argument(window, piece)
    written = unit(window, at, value)
    line = decided(window, at, value) if at is not None else s.at
    steps, epochs = s.steps, pace.epochs
    per_epoch = steps / max(epochs, 1)
    micro = backwards_taken(window, s.drives)
    k = round(micro / steps) if steps else 1
    _, lr = rates(window, s.drives)
    if how == "epoch" and per_epoch >= 3 and length >= 2.5 * s.calls:
        near = any(abs(length / total - 1) <= 0.02 for total in (steps, micro, steps + epochs) if total)
        if written == "batch" or (near and written != "epoch" and not isinstance(value, ast.Constant)):
            place_, interval = step_place(window, s)
            yield say(f"{piece.kind} is planned for {length:.0f} batches and stepped once per epoch: {s.calls} calls in {steps} steps",
                      interval or "Call scheduler.step() after every optimizer step, inside the loop over batches.", place_,
                      [Evidence(f"{s.calls} of {length:.0f} planned calls were made, one per {steps / s.calls:.0f} optimizer steps", None, s.calls, length, s.calls),
                       Evidence(f"the rate went from {lr[0]:.3g} to {lr[-1]:.3g}" if len(lr) else "no rate was recorded", "steps/lr", None, None, len(lr))], also=(line, s.at))
        return
    if how not in ("step", "micro") or epochs < 2:
        return
    rows = [float(f["rows"]) for f in window.facts("loader") if isinstance(f.get("rows"), int) and f["rows"] > 4 * per_epoch * k]
    if how == "step" and any(abs(length / (r * e) - 1) <= 0.02 for r in rows for e in {epochs, epoch_loops(window) or epochs}):
        yield say(f"{piece.kind} is planned for {length:.0f} steps: it counts rows, where {steps} batches were trained", "Count batches: epochs * len(loader), not len(dataset).",
                  line, [Evidence(f"{s.calls} of {length:.0f} planned calls", None, s.calls, length, s.calls)], also=(s.at,))
        return
    if how == "micro" and k >= 2 and (abs(length / steps - 1) < 0.05 or abs(length / (steps + epochs) - 1) < 0.05) and planned is not None and not _repeats(piece):
        yield say(f"{piece.kind} is planned for {length:.0f} optimizer steps and stepped {s.calls} times: once per batch, also where gradients only accumulate",
                  "Call scheduler.step() together with optimizer.step().", s.step_at or s.at,
                  [Evidence(f"{s.calls} calls against {steps} optimizer steps ({k} backward passes each)", None, s.calls, steps, s.calls)], also=(line,))
        return
    if how == "step" and k >= 2 and planned is not None and abs(length / micro - 1) < 0.05 and abs(length / steps - 1) > 0.3 and not _repeats(piece):
        yield say(f"{piece.kind} is planned for {length:.0f} steps, but with {k} batches accumulated there are only {steps}",
                  f"Divide the number of steps by the {k} accumulated batches.", line,
                  [Evidence(f"the schedule ends at {steps / length:.0%} of its length", None, steps, length, steps)], also=(s.at,))
        return
    turns = s.calls / length
    if turns < 2.5 or planned is None:
        return
    as_epochs = written == "epoch" or (written is None and (length == epochs or (isinstance(value, ast.Constant) and length <= epochs and per_epoch >= 1.5 * length)))
    one_epoch = written == "batch" and any(abs(length / n - 1) <= 0.01 for n in (per_epoch, pace.batches) if n)
    if not (as_epochs or one_epoch) or not _hurts(piece, s, lr, turns):
        return
    if as_epochs:
        place_, interval = step_place(window, s)
        yield say(f"{piece.kind} is planned for {length:.0f} epochs and stepped once per batch: {s.calls} calls in {epochs} epochs",
                  interval or "Call scheduler.step() once per epoch, after the loop over batches.", place_,
                  [Evidence(f"its length of {length:.0f} calls passed {turns:.0f} times, {per_epoch:.0f} calls per epoch", None, s.calls, length, s.calls)],
                  treatment="schedule-per-epoch", also=(line, s.at))
    else:
        yield say(f"{piece.kind} is planned for {length:.0f} steps, one epoch, but {epochs} epochs were trained",
                  "Multiply the number of steps by the number of epochs.", line,
                  [Evidence(f"its length passed {turns:.0f} times", None, s.calls, length, s.calls)], also=(s.at,))


def _repeats(piece: Schedule) -> bool:
    return piece.kind in ("StepLR", "CosineAnnealingWarmRestarts", "CyclicLR")


def _hurts(piece: Schedule, s: Schedule, lr: np.ndarray, turns: float) -> bool:
    """The rate is gone for a good part of the run, or swings up and down."""
    if len(lr) < 10:
        return True
    if piece.kind == "CosineAnnealingWarmRestarts":
        return turns >= 5 and int(piece.attrs.get("T_mult") or 1) == 1
    if piece.kind == "CosineAnnealingLR":
        return turns >= 3
    return float((lr <= 0.05 * lr.max()).mean()) >= 0.3


def step_place(window: Window, s: Schedule) -> tuple[Location | None, str | None]:
    """The line of the call; for a framework that makes it, the option that says how often."""
    if s.framework:
        found = keyword_line(window, "interval")
        where = found or next((Location(s.at.file, r.lineno) for st in around(window, s.at) if isinstance(st, ast.FunctionDef)
                               for r in ast.walk(st) if isinstance(r, ast.Return) and s.at is not None), None) if s.at is not None else None
        return where or s.at, 'Set "interval" of the scheduler\'s configuration to the unit its length is written in ("step" or "epoch").'
    return s.step_at or s.at, None


def overrun(window: Window, every: Sequence[Schedule], pace: Rhythm | None) -> Iterator[Finding]:
    """OneCycleLR refuses more calls than it was planned for."""
    for f in window.facts("exception"):
        told = re.search(r"Tried to step (\d+) times\. The (?:specified number of|total number of) (?:total )?steps is (\d+)", str(f.get("message") or ""))
        if told is None:
            continue
        total = int(told[2])
        s = next((s for s in every if s.kind == "OneCycleLR" and s.attrs.get("total_steps") == total), None)
        value, at = length_argument(window, s) if s is not None else (None, None)
        line = decided(window, at, value) if at is not None and value is not None else s.at if s is not None else f.at
        loops = epoch_loops(window)
        per_epoch = unit(window, at, value) == "epoch" or (loops is not None and total == loops)
        where = f.at if per_epoch else line
        yield say(f"OneCycleLR is planned for {total} calls and was stepped once more", "Call scheduler.step() once per epoch." if per_epoch
                  else "Give it the number of all optimizer steps: total_steps=epochs * len(loader).", where,
                  [Evidence(f"the run ended with: {str(f.get('message'))[:120]}", None, int(told[1]), total, total)], "fatal", also=(line, f.at))


def remarks(window: Window, s: Schedule, pace: Rhythm | None) -> Iterator[Finding]:
    """What is worth a look and may be meant: the order of the first calls, a length that the run does not have."""
    if s.early == 1 and s.calls >= 3 and not s.fact.get("metric") and not window.facts("load-state-dict"):
        yield say(f"{s.kind}.step() is called before the first optimizer.step(): the first rate of the schedule is left out", "Call optimizer.step() first, then scheduler.step().",
                  s.step_at, [Evidence("one call came before any step of its optimizer", None, 1, 0, s.calls)], "note", also=(s.at,))
    patience, floor = s.attrs.get("patience"), s.attrs.get("min_lrs")
    if s.fact.get("metric") and window.final and s.calls >= 5 and isinstance(patience, int) and patience >= s.calls:
        yield say(f"ReduceLROnPlateau waits for {patience} calls without progress, and the run made {s.calls}", "Lower the patience.", s.at,
                  [Evidence(f"{s.calls} calls", None, s.calls, patience, s.calls)], "note")
    if s.fact.get("metric") and isinstance(floor, list) and floor and isinstance(floor[0], int | float) and floor[0] >= s.base > 0:
        yield say(f"ReduceLROnPlateau can never cut the rate: min_lr {floor[0]:g} is not below {s.base:g}", "Lower min_lr.", s.at,
                  [Evidence("the lowest rate allowed is the one in use", None, floor[0], s.base, s.calls)], "note")
    for piece in (s, *parts(window, s)):
        planned = horizon(piece)
        if planned is None or s.calls < 3 or not window.final or s.fact.get("metric") or piece.kind == "SequentialLR":
            continue
        value, at = length_argument(window, piece)
        line = decided(window, at, value) if at is not None and value is not None else piece.at
        if piece.kind in ("StepLR", "MultiStepLR") and s.calls < min(piece.attrs.get("milestones") or [planned]):
            yield say(f"{piece.kind} never changed the rate: its first change is due after {min(piece.attrs.get('milestones') or [planned]):.0f} calls, and {s.calls} were made",
                      "Give it milestones inside the run, in the unit in which step() is called.", line, [Evidence(f"{s.calls} calls", None, s.calls, planned, s.calls)], "note", also=(s.at,))
        elif piece.kind == "CosineAnnealingLR" and piece is s and s.calls > 1.5 * planned:
            yield say(f"CosineAnnealingLR is planned for {planned:.0f} calls and got {s.calls}: the rate climbs again after the first half wave",
                      "Set T_max to the number of calls, or use CosineAnnealingWarmRestarts.", line, [Evidence(f"{s.calls / planned:.2g} half waves", None, s.calls, planned, s.calls)],
                      "note", also=(s.at,))
        elif piece.kind in ("CosineAnnealingLR", "OneCycleLR", "LambdaLR", "PolynomialLR") and piece is s and s.calls < 0.5 * planned:
            yield say(f"{piece.kind} came to {s.calls / planned:.0%} of its length of {planned:.0f} calls", "Give it the number of calls of step() that the run makes.", line,
                      [Evidence(f"{s.calls} calls", None, s.calls, planned, s.calls)], "note", also=(s.at,))
