"""From step times to ratios with intervals. No processes here.

**Estimator.** Two processes of the same workload, one of them watched, run *at the same time*, each on a core of its own; the
cores are swapped from round to round. What the rest of the machine does hits both. Their common time is cut into windows of
equal length; in each window the median step of the one is divided by the median step of the other, and a pair's ratio is the
median over its windows. Rounds come in pairs with swapped cores, whose geometric mean is one sample, so that a slower core
cancels. The interval is a bootstrap over those samples and the windows in them. ``null`` is the same with nobody watching: its distance from 1 is the
resolution of the measurement. All processes keep freed memory (``HEAP`` in ``run.py``), so that page faults do not decide.

The median step says what nearly every step pays; it does not see work done on every fiftieth step. So the ratio of the *mean*
step's processor time (all threads of the training process, windows again) stands beside it; that is the figure the watcher's own account of its overhead is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

START, WALL, CPU = 0, 1, 2
WARM_UP = 0.1
"""Share of the steps (at least five) left out at the start: allocator, caches, the watcher's one-time facts."""
CUT = 0.002
"""The highest of this share of steps are clipped before means are taken: they belong to the operating system."""


@dataclass(frozen=True)
class Ratios:
    """Watched over unwatched from one pair of processes, window by window."""

    medians: list[float]
    cpu_medians: list[float]
    cpu_means: list[float]


def steady(steps: np.ndarray) -> np.ndarray:
    """Rows after the warm-up. ``steps`` is [steps, 3]: start, wall and processor seconds."""
    return steps[max(5, int(WARM_UP * len(steps))):]


def compare(plain: np.ndarray, other: np.ndarray, windows: int = 12) -> Ratios:
    """Ratios of two runs that ran at the same time.

    Args:
        plain: [steps, 3] of the unwatched run; ``other`` likewise of the watched one, on the same clock.
        windows: into how many windows the common time is cut, fewer where one would hold less than two steps.

    Raises:
        ValueError: the two have no time in common.
    """
    plain, other = steady(plain), steady(other)
    begin = max(plain[0, START], other[0, START])
    end = min(plain[-1, START] + plain[-1, WALL], other[-1, START] + other[-1, WALL])
    inside = [rows[(rows[:, START] >= begin) & (rows[:, START] + rows[:, WALL] <= end)] for rows in (plain, other)]
    if min(map(len, inside)) < 2:
        raise ValueError("the two runs have no time in common: more steps are needed")
    windows = max(1, min(windows, min(map(len, inside)) // 2))
    edges = np.linspace(begin, end, windows + 1)
    ceilings = [np.quantile(rows[:, CPU], 1 - CUT) for rows in inside]
    found = Ratios([], [], [])
    for low, high in pairwise(edges):
        a, b = (rows[(rows[:, START] >= low) & (rows[:, START] < high)] for rows in inside)
        if not len(a) or not len(b):
            continue
        found.medians.append(float(np.median(b[:, WALL]) / np.median(a[:, WALL])))
        found.cpu_medians.append(float(np.median(b[:, CPU]) / max(np.median(a[:, CPU]), 1e-9)))
        means = [float(np.minimum(rows[:, CPU], ceiling).mean()) for rows, ceiling in zip((a, b), ceilings, strict=True)]
        found.cpu_means.append(means[1] / max(means[0], 1e-9))
    return found


def estimate(rounds: Sequence[Sequence[float]], level: float = 0.95, repeats: int = 2000) -> tuple[float, float, float]:
    """Ratio with a bootstrap interval from the window ratios of several rounds.

    Neighbouring rounds ran with swapped cores and count as one sample: the geometric mean of their medians. Samples are drawn
    with replacement, and within each of them the windows, so that even one pair of rounds has an interval.
    """
    rounds = [np.asarray(r, float) for r in rounds if len(r)]
    if not rounds:
        return float("nan"), float("nan"), float("nan")
    samples = list(zip(rounds[0::2], rounds[1::2], strict=False)) or [(rounds[0], rounds[0])]
    rng = np.random.default_rng(0)

    def once(redraw: bool) -> float:
        chosen = rng.integers(0, len(samples), len(samples)) if redraw else range(len(samples))
        logs = [np.mean([np.log(np.median(rng.choice(w, len(w)) if redraw else w)) for w in samples[i]]) for i in chosen]
        return float(np.exp(np.median(logs)))

    low, high = np.quantile([once(True) for _ in range(repeats)], [(1 - level) / 2, (1 + level) / 2])
    return once(False), float(low), float(high)
