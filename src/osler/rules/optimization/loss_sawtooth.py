from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, optimizer
from osler.rules.shapes import period, thinned, trend


@rule("loss-sawtooth", "optimization")
def check(window: Window, *, amplitude: float = 0.3, height: float = 0.5, min_steps: int = 120) -> Iterator[Finding]:
    """The loss goes up and down with a fixed period.

    **What it is.** A symptom, the saw-tooth ridge: the curve repeats itself, often with the length of an epoch.

    **How it is seen.** The trend (a running median over a third of the run) is taken off; the autocorrelation of the rest has a peak of
    `height` or more after its first zero, and the swing over one period is `amplitude` of the level.

    **Why it matters.** The model learns one part of the data and forgets it again, or the learning rate swings with them.

    **What to do.** First check whether the period is the epoch (rows in a fixed order: shuffle) or that of the schedule
    (cyclic rate in resonance with the data: cosine without restarts).

    **When this is wrong.** Cyclic schedules and warm restarts are meant to swing: hence only a note.

    **Source.** Handbook A §17 (saw-tooth ridge, amplitude > 30 % of the mean); the trend is taken off first *(ours)*.
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign:
        return
    found = trend(line, max(9, line.n // 3))
    rest, size = thinned(found.rest)
    wave = period(rest)
    if wave is None or wave[1] < height:
        return
    lag = wave[0]
    folded = np.array([np.median(rest[i::lag]) for i in range(lag)])
    swing, factor = float(np.exp(folded.max()) - np.exp(folded.min())), float(np.exp(folded.max() - folded.min()))
    if swing < amplitude:
        return
    made = optimizer(window)
    epoch = next((int(f["length"]) for f in window.facts("loader") if isinstance(f.get("length"), int) and abs(int(f["length"]) - lag * size) <= max(1, 0.03 * lag * size)), None)
    yield Finding("loss-sawtooth", "measured", "note", f"The loss swings by a factor of {factor:.3g} every {lag * size} steps" + (", the length of an epoch" if epoch else ""),
                  "Shuffle the rows." if epoch else "Compare the period with the epoch and with the schedule.", Where.at(made.at if made is not None else None), first_step=1,
                  last_step=int(line.steps[-1]), evidence=(Evidence(f"autocorrelation {wave[1]:.2f} at a lag of {lag * size} steps", "steps/loss", wave[1], height, line.n),))
