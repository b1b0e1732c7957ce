from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import optimizer
from osler.rules.spikes import spikes


@rule("loss-spikes", "optimization")
def check(window: Window, *, times: float = 5.0, least: int = 3) -> Iterator[Finding]:
    """The loss jumps up again and again.

    **What it is.** A symptom: single steps whose loss is several times that of the steps around them.

    **How it is seen.** `least` steps or more stand `times` above the median of the dozen steps before and after, and beyond their scatter.

    **Why it matters.** Each spike is a step in a direction that the other batches do not share.

    **What to do.** In this order. Data: open the batch of a spike, for rows of another magnitude, wrong labels, empty samples.
    Hardware: another device, temperature, memory errors (a staircase every hundred steps). Framework: known-good versions; does it happen on one
    device only? Algorithm: learning rate, warm-up, clipping.

    **When this is wrong.** Heavy-tailed targets, hard examples, warm restarts and batches of one sample spike by nature: hence only a note.

    **Source.** Handbook B §11.
    """
    found = spikes(window, times)
    if found is None or len(found.steps) < least or len(found.steps) > 0.2 * found.n:
        return
    made = optimizer(window)
    yield Finding("loss-spikes", "measured", "note", f"The loss jumps {len(found.steps)} times, typically to {float(np.median(found.ratio)):.2g} times the steps around",
                  "Open the batch of a spike first, then look at the device, the versions, and last at learning rate and clipping.",
                  Where.at(made.at if made is not None else None), first_step=int(found.steps[0]), last_step=int(found.steps[-1]),
                  evidence=(Evidence(f"highest at step {int(found.steps[int(np.argmax(found.ratio))])}: {float(np.max(found.ratio)):.3g} times the steps around", "steps/loss",
                                     float(np.max(found.ratio)), times, found.n),))
