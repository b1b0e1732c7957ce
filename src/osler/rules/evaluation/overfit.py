from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve
from osler.rules.shapes import judged


@rule("overfit", "evaluation")
def check(window: Window, *, rise: float = 0.1, scatter: float = 3.0, least: int = 5) -> Iterator[Finding]:
    """Validation gets worse while training gets better.

    **What it is.** A symptom, the parting rails: from some step on the training loss falls and the validation loss rises.

    **How it is seen.** The last validations (a quarter of them) lie `rise` above the best stretch, and `scatter` times their own noise; the training loss
    of the same time is lower than around the best.

    **Why it matters.** What is learned after the best point holds for the training rows only.

    **What to do.** First keep the weights of the best validation (early stopping with patience); then dropout of 0.3, weight decay, augmentation, more data.

    **When this is wrong.** Confident models raise the validation loss while accuracy still improves; tiny data sets overfit by nature: a note.

    **Source.** Handbook A §17 (parting rails; its gap of 0.1 is taken relative to the best).
    """
    found, line = judged(window, least), curve(window, 20)
    if found is None or line is None or not line.one_sign or (found.loss <= 0).any():
        return
    width = max(1, len(found.loss) // 8)
    smooth = np.convolve(found.loss, np.ones(width) / width, "valid")
    best = int(np.argmin(smooth))
    low, last = float(smooth[best]), float(np.median(found.loss[-max(2, len(found.loss) // 4):]))
    noise = float(np.median(np.abs(np.diff(found.loss)))) * 1.05
    if best + width >= len(found.loss) - 1 or last < (1 + rise) * low or last - low < scatter * noise:
        return
    there = found.steps[min(best + width // 2, len(found.steps) - 1)]
    around = line.loss[np.abs(line.steps - there) <= max(10, line.n // 20)]
    if len(around) < 3 or line.late >= float(np.median(around)):
        return
    at = next((f.at for f in window.facts("phase") if f.get("kind") == "validation"), None)
    yield Finding("overfit", "measured", "note", f"The validation loss is {last / low - 1:.0%} above its best at step {int(there)}, while training went on falling",
                  "Keep the weights of the best validation; then regularise or get more data.", Where.at(at), first_step=int(there), last_step=int(found.steps[-1]),
                  evidence=(Evidence(f"validation {low:.4g} at its best, {last:.4g} at the end; training {float(np.median(around)):.4g} then, {line.late:.4g} now", "calls/value", last / low - 1,
                                     rise, found.calls),))
