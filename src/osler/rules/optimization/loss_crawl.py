from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, loaded, motion, optimizer


@rule("loss-crawl", "optimization")
def check(window: Window, *, total: float = 0.35, share: float = 0.15, small: float = 5e-4, min_steps: int = 300) -> Iterator[Finding]:
    """The loss falls ever more slowly and is still high.

    **What it is.** A symptom, the spiral maze: a steady fall that hardly gets anywhere.

    **How it is seen.** Four quarters of the run: each is lower than the one before, the last one beyond the noise of its mean, yet less than `total` of the start
    is gone and the last quarter brought less than `share` of the fall. And steps are small: weights change by less than `small` of themselves.

    **Why it matters.** At this pace more steps will not do.

    **What to do.** First check the learning rate (a probe, or ten times the value), then whether the optimizer suits the problem.

    **When this is wrong.** A high floor (noise in the targets) looks the same: hence only a note.

    **Source.** Handbook A §17 (spiral maze).
    """
    line = curve(window, min_steps)
    if line is None or not line.one_sign or loaded(window) or line.start <= 0:
        return
    quarters = [float(np.mean(part)) for part in np.array_split(line.loss, 4)]
    error = line.noise / (line.n / 4) ** 0.5
    falls = [a - b for a, b in pairwise(quarters)]
    gone = 1 - line.late / line.start
    if not (0.03 < gone < total) or min(falls) < 3 * error or not (falls[0] > falls[1] > falls[2]) or falls[2] > share * sum(falls) + 3 * error:
        return
    moved = motion(window)
    if moved is None or float(np.median(moved.ratio)) > small:
        return
    made = optimizer(window)
    yield Finding("loss-crawl", "measured", "note", f"The loss falls ever more slowly: {', '.join(f'{q:.4g}' for q in quarters)} over the quarters of the run",
                  "Try ten times the learning rate, or another optimizer; compare with the noise floor of the targets.", Where.at(made.at if made is not None else None),
                  first_step=1, last_step=int(line.steps[-1]),
                  evidence=(Evidence(f"{gone:.0%} of the start is gone after {line.n} steps; the last quarter brought {falls[2] / sum(falls):.0%} of the fall", "steps/loss", gone, total, line.n),))
