from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, motion, newest, optimizer
from osler.rules.depth import growth
from osler.rules.signal.bad_init import guess


@rule("lr-too-high", "optimization")
def check(window: Window, *, overshoot: float = 4.0, big_step: float = 0.2, grown: float = 2.0, unlearned: float = 0.1,
          jump: float = 5.0, wild: float = 10.0, min_steps: int = 20) -> Iterator[Finding | NotChecked]:
    """The learning rate is too high by a large factor.

    **What it is.** Steps are so long that they leave the region where the gradient means anything: the loss jumps up, and
    then is lost to infinity or stays at the level of a guess.

    **How it is seen.** Two things together, both free of scale. The outcome: the loss ends no lower than a share `unlearned`
    below its very first value, or rose tenfold and became non-finite (or just became so, after a step that changed the weights by
    `wild` times their norm). And the cause: steps promise, to first order, a fall of
    more than `overshoot` times the whole loss (a quadratic bowl is unstable beyond 4), or they change the weights by
    `big_step` of their norm while the weights grew by `grown` or the loss jumped to `jump` times its start.

    **Why it matters.** Nothing is learned, and units may be dead for good.

    **What to do.** Divide the rate by 10 until the loss falls; a warm-up or clipping helps where only the first steps are wild.

    **When this is wrong.** Losses of either sign and models of several optimizers in turn are not judged, nor is a deep stack whose signal grows with depth
    before any step (exploding-gradients).

    **Source.** Handbook A §17 (vertical cliff); update ratios of 1e-3 as healthy: Karpathy, CS231n notes.
    """
    if window.n_steps < 2 or growth(window, guess(window)) is not None:
        return
    made = optimizer(window)
    lost = nonfinite.first(window, "loss", "gradient", "parameter")
    rise = nonfinite.growing(lost, window)
    move = motion(window)
    lr = newest(window)["lr"]
    rate = float(np.nanmax(lr)) if len(lr) and np.isfinite(lr).any() else float("nan")
    where = Where.at(made.at if made is not None else None)
    fix = f"Lower the learning rate (now {rate:.3g}) by a factor of 10 to 100, or start with a warm-up."
    if lost is not None and not nonfinite.from_data(window, lost):
        before = move.ratio[move.steps <= lost.step + 1] if move is not None else np.empty(0)
        long = float(np.max(before)) if len(before) else None
        if (rise is not None and (long >= big_step if long is not None else rise >= 1000)) or (long is not None and long >= wild):
            evidence = [Evidence(f"the loss rose to {rise:.3g} times its start in {lost.step} steps and became non-finite", "steps/loss", rise, 10.0,
                                 len(window.steps))] if rise is not None else []
            if long is not None and move is not None:
                evidence.append(Evidence(f"a step changed the weights by {long:.2g} of their norm (median over {move.layers} layers)",
                                         "layers/update_norm", long, big_step, len(move.steps)))
            yield Finding("lr-too-high", "measured", "fatal", f"At learning rate {rate:.3g} the loss "
                          + (f"grew {rise:.3g}-fold and was lost" if rise is not None else f"was lost in {lost.step} steps"), fix, where,
                          first_step=1, last_step=lost.step, evidence=tuple(evidence), treatment="lr-down")
        return
    line = curve(window, min_steps)
    if line is None or move is None:
        yield NotChecked("lr-too-high", "needs the loss and sampled updates of one optimizer over at least "
                         f"{min_steps} steps")
        return
    reference = min(line.first, line.start)
    if not line.one_sign or line.late < (1 - unlearned) * reference:
        return
    level = np.interp(move.steps, line.steps, line.loss)
    promise = move.promise / np.maximum(np.minimum(level, line.first), 1e-12)
    early = slice(0, max(3, len(promise) // 3))
    over, ratio = float(np.median(promise[early])), float(np.median(move.ratio[early]))
    peak = float(line.loss.max())
    if over < overshoot and not (ratio >= big_step and (move.growth >= grown or peak >= jump * line.first)):
        return
    yield Finding(
        "lr-too-high", "measured", "fatal" if line.late >= reference else "harmful",
        f"Steps at learning rate {rate:.3g} overshoot: the loss went from {line.first:.4g} up to {peak:.4g} and ends at {line.late:.4g}", fix, where,
        first_step=1, last_step=int(line.steps[-1]),
        evidence=(Evidence(f"a step promises to lower the loss by {over:.2g} times its whole value (median of the first {len(promise[early])} sampled "
                           "steps)", "layers/descent", over, overshoot, len(promise)),
                  Evidence(f"a step changes the weights by {ratio:.2g} of their norm; the loss jumped to {peak / line.first:.3g} times its start",
                           "layers/update_norm", ratio, big_step, len(move.ratio)),
                  Evidence(f"the loss ends at {line.late / reference:.2g} times its start", "steps/loss", line.late / reference, 1 - unlearned, line.n)),
        treatment="lr-down")
