"""``absurd-rows``: a few rows of the training data that lie orders of magnitude away from all others.

A heavy tail is no fault: its extremes follow one another at small ratios. An absurd row stands alone, with a gap before the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from osler.watch.experiments.rowset import Array, RowSet
from osler.watch.experiments.subject import figure

GAP = 20.0
FEW = 0.02


def extent(values: Array) -> npt.NDArray[np.float64]:
    """How far each row lies from the middle, in units of its columns' usual extent [rows]; columns that hardly vary borrow the
    typical extent of the others."""
    table = values.reshape(len(values), -1).astype(np.float64)
    table = np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0)
    middle = np.median(table[:4000], 0)
    away = np.abs(table - middle)
    usual = np.quantile(away[:: max(1, len(away) // 4000)], 0.95, axis=0)
    typical = float(np.median(usual[usual > 0])) if (usual > 0).any() else 0.0
    scale = np.maximum(usual, 0.5 * typical)
    if typical == 0.0:
        return np.zeros(len(table))
    worst: npt.NDArray[np.float64] = (away / np.where(scale > 0, scale, np.inf)).max(1)
    return worst


def lonely(size: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], float, float] | None:
    """Rows beyond a gap: their numbers, the least of their extents and the largest of the rest."""
    order = np.argsort(size)[::-1]
    most = max(1, min(int(FEW * len(size)), 40))
    top = size[order[: most + 1]]
    if len(top) < 2:
        return None
    ratio = top[:-1] / np.maximum(top[1:], 1.0)
    cut = int(np.argmax(ratio))
    if ratio[cut] < GAP or not np.isfinite(ratio[cut]):
        return None
    return order[: cut + 1].astype(np.int64), float(top[cut]), float(top[cut + 1])


def absurd_rows(rows: RowSet) -> dict[str, Any] | None:
    """The fact for one set of rows, or ``None`` where nothing stands out."""
    found: dict[str, Any] | None = None
    for what, values in (("input", rows.x), ("target", rows.y)):
        if len(values) < 40:
            continue
        alone = lonely(extent(values))
        if alone is not None and (found is None or alone[1] > (found["extent"] or 0)):
            numbers, least, rest = alone
            table = values.reshape(len(values), -1)
            others = np.delete(table, numbers, 0)
            found = {"what": what, "rows": [int(rows.index[i]) for i in numbers[:20]], "count": len(numbers), "total": rows.total, "seen": len(rows.index),
                     "extent": figure(least), "rest": figure(rest), "low": figure(float(np.nanmin(table[numbers]))), "high": figure(float(np.nanmax(table[numbers]))),
                     "usual_low": figure(float(np.nanmin(others))), "usual_high": figure(float(np.nanmax(others))), "source": rows.name}
    return found
