from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, optimizer
from osler.rules.shapes import trend


@rule("loss-jitter", "optimization")
def check(window: Window, *, scatter: float = 0.6, times: float = 2.0, min_steps: int = 100, early: int = 1000) -> Iterator[Finding]:
    """The loss jitters from step to step.

    **What it is.** A symptom, the quantum jitter: once its trend is taken off, the loss scatters by more than half its level, or far more in its
    first steps than later.

    **How it is seen.** log(loss / running median): its robust deviation is above `scatter`; or, in the first tenth (at most `early` steps), above a fifth and `times`
    that of the rest. The handbook's test (deviation above 20 % of the mean) is ⚠ wrong: a smooth fall has 0.71. The trend goes first.

    **Why it matters.** Progress smaller than the jitter cannot be seen; early jitter means that the rate rises faster than the model settles.

    **What to do.** Early: a longer warm-up. Throughout: larger batches or a lower rate; if two runs with one seed differ, look at randomness
    and hardware.

    **When this is wrong.** Batches of one sample, losses near zero and heavy tails jitter by nature: hence only a note.

    **Source.** Handbook A §10 and §17 (quantum jitter).
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign or line.late < 1e-3 * line.start:
        return
    found = trend(line, 25)
    head = min(early, max(20, line.n // 10))
    first = float(np.median(np.abs(found.rest[3:head]))) * 1.48
    later = float(np.median(np.abs(found.rest[head:]))) * 1.48
    rough = found.scatter
    if not (rough > scatter or (first > 0.2 and first > times * later)):
        return
    made = optimizer(window)
    begins = rough <= scatter
    yield Finding("loss-jitter", "measured", "note",
                  f"The loss jitters by {first:.0%} in its first {head} steps, {later:.0%} later" if begins else f"The loss jitters by {rough:.0%} of its level from step to step",
                  "Lengthen the warm-up." if begins else "Try larger batches or a lower rate; check that two runs with one seed agree.",
                  Where.at(made.at if made is not None else None), first_step=1, last_step=int(line.steps[min(head, line.n - 1)] if begins else line.steps[-1]),
                  evidence=(Evidence(f"robust deviation of log(loss / running median): {first:.2f} in the first {head} steps, {later:.2f} later", "steps/loss", max(rough, first),
                                     0.2 if begins else scatter, line.n),))
