"""Isolated jumps of the training loss, measured against the steps around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from osler.core.window import Window
from osler.rules.curve import Floats, in_turn, newest

HALF = 12


@dataclass(frozen=True, slots=True)
class Spikes:
    """Steps at which the loss stands out, and by how much.

    Attributes:
        steps: step numbers; ratio: loss there over the median of the steps around; alone: the loss was back soon after.
        n: steps of the curve; lost: steps whose loss was not finite.
    """

    steps: npt.NDArray[np.int64]
    ratio: Floats
    alone: npt.NDArray[np.bool_]
    n: int
    lost: int


def candidates(loss: Floats, times: float, most: int = 5000) -> npt.NDArray[np.int64]:
    """Steps that stand ``times`` above the lowest of their neighbours: only they can be spikes, so only they are looked at closely."""
    lowest = loss.copy()
    for shift in range(1, HALF + 1):
        lowest[shift:] = np.minimum(lowest[shift:], loss[:-shift])
        lowest[:-shift] = np.minimum(lowest[:-shift], loss[shift:])
    found = np.flatnonzero(loss > times * lowest)
    found = found[found > 2]
    if len(found) > most:  # a curve this wild has no spikes; the highest are kept
        found = np.sort(found[np.argsort(-loss[found])[:most]])
    return found.astype(np.int64)


def around(loss: Floats, chosen: npt.NDArray[np.int64], half: int = HALF) -> tuple[Floats, Floats]:
    """Median and scaled median deviation of the neighbours before and after each chosen step, the step itself and the next two left out."""
    if not len(chosen):
        return np.empty(0), np.empty(0)
    offsets = np.array([o for o in range(-half, half + 1) if o not in (0, 1, 2)])
    index = chosen[:, None] + offsets[None]
    valid = (index >= 0) & (index < len(loss))
    table = np.where(valid, loss[index.clip(0, len(loss) - 1)], np.nan)
    middle = np.nanmedian(table, 1)
    return middle, np.nanmedian(np.abs(table - middle[:, None]), 1) * 1.48


def spikes(window: Window, times: float = 5.0, sigmas: float = 10.0, least: int = 30) -> Spikes | None:
    """``None`` where the loss was not seen often enough, takes both signs, or several optimizers take turns."""
    rows = newest(window)
    if len(rows) < least or in_turn(window):
        return None
    loss = rows["loss"].astype(np.float64)
    finite = np.isfinite(loss)
    if finite.sum() < least or (loss[finite] <= 0).mean() > 0.1:
        return None
    steps, loss = rows["step"][finite].astype(np.int64), np.abs(loss[finite])  # one absurd target can turn the sign of a likelihood
    chosen = candidates(loss, times)
    middle, scatter = around(loss, chosen)
    before = np.array([np.median(loss[max(0, i - HALF):i]) for i in chosen])
    own = loss[chosen]
    level = np.where(own > times * before, np.minimum(middle, before), middle) if len(chosen) else own
    high = (own > times * level) & (own - level > sigmas * scatter)
    kept = [k for k in np.flatnonzero(high) if own[k] >= loss[max(0, chosen[k] - 2):chosen[k] + 3].max()]
    index = chosen[kept]
    back = np.array([bool(np.min(loss[i + 1:i + 1 + HALF], initial=np.inf) < 0.3 * loss[i]) for i in index], dtype=bool)
    return Spikes(steps[index], loss[index] / np.maximum(level[kept], 1e-12), back, len(loss), int((~finite).sum()))
