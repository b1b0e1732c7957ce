from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, loaded, optimizer


@rule("loss-plateau", "optimization")
def check(window: Window, *, fall: float = 0.03, min_steps: int = 200) -> Iterator[Finding]:
    """The loss stayed where it began.

    **What it is.** A symptom: over the whole run the loss has hardly fallen, and no part of it was much lower.

    **How it is seen.** Neither the late median nor the lowest running median lies more than `fall` below the start.

    **Why it matters.** Nothing was learned yet.

    **What to do.** Look for the cause: gradients that do not arrive, a learning rate that is too low, labels that do not belong
    to the inputs, an output that cannot reach its targets.

    **When this is wrong.** Problems with a long plateau before the fall (parity), losses that mean nothing by themselves
    (policy gradients), models that start solved: hence only a note.

    **Source.** Handbook A §17 (level plateau).
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign or loaded(window) or line.start <= 0 or line.late < (1 - fall) * line.start or line.low < (1 - 2 * fall) * line.start \
            or line.late > 1.2 * line.start:
        return
    accuracy = window.calls["accuracy"][np.isfinite(window.calls["accuracy"])]
    if len(accuracy) and float(np.median(accuracy[-20:])) > 0.95:
        return
    made = optimizer(window)
    yield Finding("loss-plateau", "measured", "note", f"The loss has hardly moved in {line.n} steps: {line.start:.4g} to {line.late:.4g}",
                  "Look for the cause: do gradients arrive, is the rate high enough, do labels belong to their inputs?",
                  Where.at(made.at if made is not None else None), first_step=1, last_step=int(line.steps[-1]),
                  evidence=(Evidence(f"the loss fell by {line.fall:.2%} of its start", "steps/loss", line.fall, fall, line.n),))
