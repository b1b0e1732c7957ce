from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, loaded, motion, newest, optimizer

FIRST_ORDER = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD")


@rule("lr-too-low", "optimization")
def check(window: Window, *, path: float = 0.1, reach: float = 0.1, fall: float = 0.1, healthy: float = 1e-3, min_steps: int = 100) -> Iterator[Finding | NotChecked]:
    """The learning rate is too low by a large factor.

    **What it is.** Every step is so short that all of them together cannot train the model.

    **How it is seen.** Scale-free and over the whole run: the sum of all updates moved the weight matrices by less than `path` of
    their norm; all steps together could lower the loss by less than `reach` of its value, to first order; and the loss did
    fall by less than `fall`. The rate that would give the usual update ratio `healthy` must itself be an ordinary one,
    else the gradient is what is small.

    **Why it matters.** The run's time is spent and nothing is learned.

    **What to do.** Multiply the rate by the factor named in the finding, or ask `osler probe learning-rate`.

    **When this is wrong.** Models that start from loaded weights, solved problems, warm-ups still under way, gradients cut by
    clipping and updates lost in low precision have other causes or none, and are left out.

    **Source.** Handbook A §17 (spiral maze); DeepFD (ICSE 2022); update ratio 1e-3: CS231n notes.
    """
    if window.n_steps < min_steps or loaded(window):
        return
    line, move, made = curve(window, min_steps // 2), motion(window), optimizer(window)
    if line is None or move is None:
        yield NotChecked("lr-too-low", f"needs the loss and sampled updates of one optimizer over at least {min_steps} steps")
        return
    lr = newest(window)["lr"].astype(float)
    lr = lr[np.isfinite(lr) & (lr > 0)]
    if not line.one_sign or line.fall > fall or not len(lr) or made is None or solved(window):
        return
    peak = float(lr.max())
    asked = (made.get("defaults") or {}).get("lr")
    scheduled = peak > 1.2 * float(np.median(lr[-max(3, len(lr) // 10):])) or lr[-1] > 1.2 * float(np.median(lr))
    if isinstance(asked, int | float) and peak < 0.2 * asked:
        return
    spared = peak / float(np.median(lr)) if scheduled else 1.0  # a schedule is to blame only if its peak, kept up, would have been enough
    n = int(max(window.n_steps, line.steps[-1]) - line.steps[0] + 1)
    typical = typical_rate(window, move.steps, made)
    if typical is None:
        return
    used, factors = typical
    ratio = float(np.median(move.ratio[used] * factors))
    moved = ratio * n
    level = np.maximum(np.interp(move.steps, line.steps, line.loss), 1e-12)
    bought = float(np.median((move.promise / level)[used] * factors)) * n
    if clipped(window) or not ratio > 0 or moved * spared > path or bought * spared > reach or bought <= 0:
        return
    factor = healthy / ratio
    if str(made.get("class")) not in FIRST_ORDER or factor < 3 or factor * peak > (3.0 if made.get("class") == "SGD" else 0.3):
        return
    nice = float(f"{factor * peak:.0e}")
    yield Finding(
        "lr-too-low", "measured", "harmful", f"{n} steps at learning rate {peak:.3g} moved the weights by {moved:.1%} at most",
        f"Raise the learning rate, to about {nice:.0e} (now {peak:.3g}).", Where.at(made.at), first_step=1, last_step=int(line.steps[-1]),
        evidence=(Evidence(f"a step changes the weights by {ratio:.1e} of their norm (median over {move.layers} matrices; sampled {len(factors)} times)", "layers/update_norm", ratio, healthy, len(factors)),
                  Evidence(f"all {n} steps together could lower the loss by at most {bought:.1%}", "layers/descent", bought, reach, len(factors)),
                  Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, fall, line.n)),
        treatment="lr-up")


def typical_rate(window: Window, sampled: npt.NDArray[np.int64], made: Fact) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]] | None:
    """Which samples count, and the factor from each to an ordinary step: its learning rate against the run's median, and the
    momentum that the first steps have not gathered yet."""
    rows = newest(window)
    rows = rows[np.isfinite(rows["lr"])]
    if not len(rows):
        return None
    rate = np.interp(sampled, rows["step"], rows["lr"].astype(float))
    middle = float(np.median(rows["lr"][rows["lr"] > 0])) if (rows["lr"] > 0).any() else 0.0
    used = rate > 0
    momentum = (made.get("defaults") or {}).get("momentum") or 0.0
    ramp = np.where(sampled < 10, 1 / (1 - min(float(momentum), 0.99)), 1.0)
    return (used, (middle / rate[used]) * ramp[used]) if used.any() and middle > 0 else None


def solved(window: Window) -> bool:
    """Accuracy is high already: there is little to learn."""
    accuracy = window.calls["accuracy"]
    accuracy = accuracy[np.isfinite(accuracy)]
    return bool(len(accuracy) and np.median(accuracy[-max(5, len(accuracy) // 10):]) > 0.95)


def clipped(window: Window) -> bool:
    """Clipping shortens nearly every step by a large factor."""
    return any((f.get("clipped") or 0) > 0.5 * max(f.get("calls") or 1, 1) and (f.get("median_norm") or 0) > 3 * (f.get("max_norm") or float("inf"))
               for f in window.facts("clip"))
