from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.shapes import judged


@rule("loss-stairs", "evaluation")
def check(window: Window, *, fall: float = 0.5, settled: int = 3) -> Iterator[Finding]:
    """The validation loss halves between two validations.

    **What it is.** A symptom, the stair collapse: a validation loss that had settled loses more than `fall` of itself at once.

    **How it is seen.** Mean validation loss of each validation; the `settled` before the fall agree within a fifth, all after it stay low.

    **Why it matters.** Learning is gradual; a collapse often means that something else began: validation rows or labels that leak in, another set.

    **What to do.** First hash the rows of both splits; then compare labels, then the schedule (a step of the rate also makes stairs).

    **When this is wrong.** Step schedules, unfreezing, sudden understanding after a plateau: hence only a note.

    **Source.** Handbook A §17 (stair collapse).
    """
    found = judged(window, settled + 2)
    if found is None or (found.loss <= 0).any():
        return
    for i in range(settled, len(found.loss)):
        before = found.loss[i - settled:i]
        if np.ptp(before) < 0.2 * before.mean() and found.loss[i:].max() < (1 - fall) * before.min():
            at = next((f.at for f in window.facts("phase") if f.get("kind") == "validation"), None)
            yield Finding("loss-stairs", "measured", "note", f"The validation loss fell from {before[-1]:.4g} to {found.loss[i]:.4g} at once",
                          "Compare the rows and labels of both splits by hash, then look at the schedule.", Where.at(at), first_step=int(found.steps[i - 1]), last_step=int(found.steps[i]),
                          evidence=(Evidence(f"validations before: {', '.join(f'{v:.4g}' for v in before)}; after: {found.loss[i]:.4g}", "calls/value", 1 - float(found.loss[i] / before[-1]),
                                             fall, found.calls),))
            return
