from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, optimizer


@rule("loss-diverged", "optimization")
def check(window: Window, *, rise: float = 2.0, scatter: float = 4.0, min_steps: int = 50) -> Iterator[Finding]:
    """The loss rose and did not come back.

    **What it is.** A symptom: the loss of the last tenth of the run lies far above that of the first steps.

    **How it is seen.** The late median is `rise` times the start, and above it by `scatter` times the noise between steps.

    **Why it matters.** The model got worse by its own measure.

    **What to do.** Look for the cause: learning rate, sign of the loss, gradients that pile up, initialisation.

    **When this is wrong.** Terms that are faded in (KL annealing, consistency ramps), adversarial losses, changing tasks:
    hence only a note.

    **Source.** Handbook A §17.
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign or line.start <= 0 or line.late < rise * line.start or line.late - line.start < scatter * line.noise:
        return
    made = optimizer(window)
    yield Finding("loss-diverged", "measured", "note", f"The loss rose from {line.start:.4g} to {line.late:.4g}",
                  "Look for the cause: learning rate, sign of the loss, gradients that are not cleared.", Where.at(made.at if made is not None else None),
                  first_step=1, last_step=int(line.steps[-1]),
                  evidence=(Evidence(f"median of the last tenth is {line.late / line.start:.2g} times that of the first steps", "steps/loss",
                                     line.late / line.start, rise, line.n),))
