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


def around(loss: Floats, half: int = HALF) -> tuple[Floats, Floats]:
    """Median and scaled median deviation of the neighbours before and after each step, the step itself and the next two left out."""
    offsets = np.array([o for o in range(-half, half + 1) if o not in (0, 1, 2)])
    index = np.arange(len(loss))[:, None] + offsets[None]
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
    middle, scatter = around(loss)
    before = np.array([np.median(loss[max(0, i - HALF):i]) if i > 2 else np.inf for i in range(len(loss))])
    level = np.where(loss > times * before, np.minimum(middle, before), middle)
    high = (loss > times * level) & (loss - level > sigmas * scatter) & (np.arange(len(loss)) > 2)
    peaks = [i for i in np.flatnonzero(high) if loss[i] >= loss[max(0, i - 2):i + 3].max()]
    back = np.array([bool(np.min(loss[i + 1:i + 1 + HALF], initial=np.inf) < 0.3 * loss[i]) for i in peaks], dtype=bool)
    index = np.array(peaks, dtype=np.int64)
    return Spikes(steps[index], loss[index] / np.maximum(level[index], 1e-12), back, len(loss), int((~finite).sum()))
