from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, loaded, optimizer


@rule("loss-cliff", "optimization")
def check(window: Window, *, lost: float = 0.9, flat: float = 0.05, first: int = 3, min_steps: int = 60) -> Iterator[Finding]:
    """Nearly all of the loss is gone in the first steps, and then nothing.

    **What it is.** A symptom, the vertical cliff: the first `first` steps take more than `lost` of the loss, all later ones together less than `flat` of
    what is left.

    **How it is seen.** The first value against the median of the steps after the cliff, and that one against the end.

    **Why it matters.** The fall only undoes a bad start (outputs far too large); the level it ends on is often a constant answer.

    **What to do.** First check the scale of the outputs at the start; then the initialisation (He for ReLU), then a tenth of the learning rate.

    **When this is wrong.** Problems that a few steps solve; losses that end near zero are left out.

    **Source.** Handbook A §17 (vertical cliff).
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign or loaded(window) or line.first <= 0:
        return
    after = float(np.median(line.loss[first:first + 12]))
    if after > (1 - lost) * line.first or line.late < (1 - flat) * after - 2 * line.noise or line.late < 1e-3 * line.first:
        return
    made = optimizer(window)
    yield Finding("loss-cliff", "measured", "note", f"The loss fell from {line.first:.4g} to {after:.4g} within {first} steps and has stayed there",
                  "Look at the scale of the first outputs and at the initialisation, then try a tenth of the learning rate.", Where.at(made.at if made is not None else None),
                  first_step=1, last_step=int(line.steps[-1]),
                  evidence=(Evidence(f"{1 - after / line.first:.0%} of the first value gone in {first} steps, {1 - line.late / after:.1%} of the rest since", "steps/loss",
                                     1 - after / line.first, lost, line.n),))
