"""Shapes of a loss curve, told by figures that are relative to the curve itself.

A shape is a symptom: it says where to look first and is folded under a cause when one is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from osler.core.window import Window
from osler.rules.curve import Curve, Floats


@dataclass(frozen=True, slots=True)
class Trend:
    """The slow part of a curve and what is left: running median [steps], and log(loss / median) [steps]."""

    level: Floats
    rest: Floats

    @property
    def scatter(self) -> float:
        """Robust standard deviation of the relative rest."""
        return float(np.median(np.abs(self.rest - np.median(self.rest)))) * 1.48


def running_median(values: Floats, width: int) -> Floats:
    """Median of the ``width`` values around each. Long curves are looked at in a grid of places, each by at most 257 of its neighbours."""
    half, n = width // 2, len(values)
    if n * width <= 2_000_000:
        padded = np.pad(values, half, mode="edge")
        return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)[:n])
    centers = np.unique(np.linspace(0, n - 1, min(n, max(600, 8 * n // width))).astype(np.int64))
    offsets = np.linspace(-half, half, min(width, 257)).astype(np.int64)
    level = np.median(values[(centers[:, None] + offsets[None]).clip(0, n - 1)], axis=1)
    return np.asarray(np.interp(np.arange(n), centers, level))


def trend(line: Curve, width: int) -> Trend:
    loss = np.maximum(line.loss, 1e-30)
    level = running_median(loss, width)
    return Trend(level, np.log(loss / level))


def thinned(values: Floats, most: int = 4000) -> tuple[Floats, int]:
    """At most ``most`` values, each the mean of a stretch, and the length of a stretch."""
    size = max(1, -(-len(values) // most))
    n = len(values) // size * size
    return values[:n].reshape(-1, size).mean(1), size


def period(rest: Floats, least: int = 4) -> tuple[int, float] | None:
    """Lag of the first high peak of the autocorrelation and its height; at least three periods must fit."""
    x = rest - rest.mean()
    n = len(x)
    total = float((x * x).sum())
    if n < 8 * least or total <= 0:
        return None
    spectrum = np.fft.rfft(x, 2 * n)
    correlation = np.fft.irfft(spectrum * np.conj(spectrum))[: n // 3] / total * n / (n - np.arange(n // 3))
    negative = np.flatnonzero(correlation < 0)
    start = max(least, int(negative[0]) if len(negative) else least)
    if start >= len(correlation) - 1:
        return None
    lag = start + int(np.argmax(correlation[start:]))
    return lag, float(correlation[lag])


@dataclass(frozen=True, slots=True)
class Judged:
    """Mean validation loss of one criterion at each step where it was measured [validations]."""

    steps: npt.NDArray[np.int64]
    loss: Floats
    calls: int


def judged(window: Window, least: int = 4) -> Judged | None:
    """The criterion most used without gradients; ``None`` where there are too few validations."""
    rows = window.calls
    rows = rows[(rows["phase"] == 1) & np.isfinite(rows["value"])]
    if not len(rows):
        return None
    kinds, counts = np.unique(rows["criterion"], return_counts=True)
    rows = rows[rows["criterion"] == kinds[int(np.argmax(counts))]]
    steps, where = np.unique(rows["step"], return_inverse=True)
    if len(steps) < least:
        return None
    weight = np.maximum(rows["batch"].astype(float), 1.0)
    loss = np.bincount(where, rows["value"].astype(float) * weight) / np.bincount(where, weight)
    return Judged(steps.astype(np.int64), loss, len(rows))
