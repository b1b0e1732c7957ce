"""``label-dependence``: can the targets be told from the inputs at all, and would another pairing of the same rows tell them better?

A kernel ridge regression on the training rows; its leave-one-out predictions for any number of re-pairings come from one factorisation. The
yardstick is the same figure for targets in random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from osler.watch.experiments.rowset import (
    FEWEST,
    Array,
    RowSet,
)
from osler.watch.experiments.subject import figure

MOST = 700
DRAWS = 24
RIDGE = 0.3
SHIFTS = (1, -1, 2, -2, 3, -3)
MAX_CLASSES = 60


@dataclass(frozen=True)
class Probe:
    """A fitted regression on a choice of rows.

    Attributes:
        rows: which rows of the set; hat: (K + ridge)^-1; kernel parameters for new rows.
    """

    rows: npt.NDArray[np.int64]
    hat: torch.Tensor
    x: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor
    width: float

    def loo(self, y: torch.Tensor) -> torch.Tensor:
        """Leave-one-out predictions for targets [rows, columns]."""
        return y - (self.hat @ y) / self.hat.diagonal().unsqueeze(1)

    def predict(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return kernel(((x - self.mean) / self.scale).clamp(-6, 6), self.x, self.width) @ (self.hat @ y)


def kernel(a: torch.Tensor, b: torch.Tensor, width: float) -> torch.Tensor:
    return torch.exp(-torch.cdist(a, b).square() / width) + (a @ b.T) / (2 * a.shape[1])


def fit(rows: RowSet, chosen: npt.NDArray[np.int64]) -> Probe | None:
    x = torch.from_numpy(np.nan_to_num(rows.x[chosen], nan=0.0, posinf=0.0, neginf=0.0)).double()
    mean, scale = x.mean(0), x.std(0)
    keep = scale > 1e-9
    if not bool(keep.any()):
        return None
    scale = torch.where(keep, scale, torch.ones_like(scale) * 1e9)
    z = ((x - mean) / scale).clamp(-6, 6)
    distance = torch.cdist(z[:200], z[:200]).square()
    width = 2 * float(distance[distance > 0].median()) if bool((distance > 0).any()) else 1.0
    gram = kernel(z, z, width)
    gram.diagonal().add_(RIDGE)
    return Probe(chosen, torch.linalg.inv(gram), z, mean, scale, width)


def coded(rows: RowSet, y: Array) -> torch.Tensor:
    """Classes as centred indicators; quantities as ranks, which no outlier moves."""
    if rows.classes:
        kinds = np.unique(rows.y)
        return torch.from_numpy((y[:, None] == kinds[None]).astype(np.float64) - (rows.y[:, None] == kinds[None]).mean(0))
    table = y.reshape(len(y), -1)
    order = table.argsort(0).argsort(0).astype(np.float64)
    return torch.from_numpy(order / max(len(y) - 1, 1) - 0.5)


def hits(rows: RowSet, predicted: torch.Tensor, y: Array) -> float:
    """Share of classes told right, or the mean rank correlation."""
    if rows.classes:
        kinds = np.unique(rows.y)
        prior = torch.from_numpy((rows.y[:, None] == kinds[None]).mean(0))
        return float((kinds[(predicted + prior).argmax(1).numpy()] == y).mean())
    p, t = predicted, coded(rows, y)
    p, t = p - p.mean(0), t - t.mean(0)
    return float(((p * t).sum(0) / (p.norm(dim=0) * t.norm(dim=0) + 1e-12)).mean())


def chosen_rows(rows: RowSet) -> npt.NDArray[np.int64]:
    """Rows to fit on: stretches of neighbours, spread over the set, without ignored targets."""
    good = np.flatnonzero(rows.y >= 0) if rows.classes and (rows.y < 0).any() else np.arange(len(rows.y))
    if len(good) <= MOST:
        return good
    length = MOST // 10
    starts = np.linspace(0, len(good) - length, 10).astype(int)
    return np.unique(np.concatenate([good[s:s + length] for s in starts]))


def moved(rows: RowSet, chosen: npt.NDArray[np.int64], by: int) -> tuple[npt.NDArray[np.bool_], Array]:
    """Targets of the rows ``by`` places on in the source; where there is none, the mask is false."""
    if rows.all_y is not None:
        place = rows.index[chosen] + by
        return (place >= 0) & (place < len(rows.all_y)), rows.all_y[place.clip(0, len(rows.all_y) - 1)]
    there = np.searchsorted(rows.index, rows.index[chosen] + by).clip(0, len(rows.index) - 1)
    return rows.index[there] == rows.index[chosen] + by, rows.y[there]


def dependence(rows: RowSet, least: int = FEWEST) -> tuple[dict[str, Any], Probe] | None:
    """Score of the pairing as it is, of random pairings, and of the neighbours' targets."""
    chosen = chosen_rows(rows)
    y = rows.y[chosen]
    if len(chosen) < least or (rows.classes == 1) or rows.classes > MAX_CLASSES or not np.isfinite(rows.y).all() or (rows.classes == 0 and np.ptp(y) == 0):
        return None
    probe = fit(rows, chosen)
    if probe is None:
        return None
    generator = np.random.default_rng(0)
    null = [hits(rows, probe.loo(coded(rows, p)), p) for p in (y[generator.permutation(len(y))] for _ in range(DRAWS))]
    mean, spread = float(np.mean(null)), max(float(np.std(null)), 1e-3)
    score = hits(rows, probe.loo(coded(rows, y)), y)
    row: dict[str, Any] = {"rows": len(chosen), "total": rows.total, "classes": rows.classes, "source": rows.name, "columns": rows.x.shape[1],
                           "score": figure(score), "null": figure(mean), "spread": figure(spread), "z": figure((score - mean) / spread)}
    best = (0, score)
    for by in SHIFTS:
        there, other = moved(rows, chosen, by)
        if there.mean() < 0.8 or _copies(rows.x[chosen], other, there):
            continue
        other = np.where(there if other.ndim == 1 else there[:, None], other, y)
        value = hits(rows, probe.loo(coded(rows, other)), other)
        if value > best[1]:
            best = (by, value)
    row["neighbours"] = figure(alike(rows, chosen))
    row |= {"shift": best[0], "shift_score": figure(best[1]), "shift_z": figure((best[1] - mean) / spread)}
    return row, probe


def apart(probe: Probe, other: RowSet) -> float:
    """Distance of the centroids of two sets in the first two principal components of the first, in its deviations there."""
    x = torch.from_numpy(np.nan_to_num(other.x[:: max(1, len(other.x) // MOST)])).double()
    z = ((x - probe.mean) / probe.scale).clamp(-6, 6)
    values, vectors = torch.linalg.eigh(probe.x @ probe.x.T)
    top, power = vectors[:, -2:], values[-2:].clamp_min(1e-9)
    own, seen = probe.x @ probe.x.T @ top / power.sqrt(), z @ probe.x.T @ top / power.sqrt()
    return float(((seen.mean(0) - own.mean(0)) / own.std(0).clamp_min(1e-9)).norm())


def alike(rows: RowSet, chosen: npt.NDArray[np.int64]) -> float:
    """Mean correlation of a column with itself one row on: near 0 for rows in random order, high for a series in time."""
    follow = np.flatnonzero(np.diff(rows.index[chosen]) == 1)
    if len(follow) < 30:
        return 0.0
    x = np.nan_to_num(rows.x[chosen].astype(np.float64))[:, :256]
    a, b = x[follow], x[follow + 1]
    a, b = a - a.mean(0), b - b.mean(0)
    size = np.sqrt((a * a).sum(0) * (b * b).sum(0))
    good = size > 1e-9
    return float(((a * b).sum(0)[good] / size[good]).mean()) if good.any() else 0.0


def _copies(x: Array, y: Array, there: npt.NDArray[np.bool_]) -> bool:
    """The moved target stands among the features: a forecast of the series itself."""
    column = y.reshape(len(y), -1)[:, :1].astype(np.float32)
    return bool((np.abs(x - column) < 1e-6)[there].any(1).mean() > 0.8) if np.isfinite(column).all() and len(np.unique(column)) > 20 else False


def contradictions(rows: RowSet, probe: Probe, other: RowSet | None) -> dict[str, Any]:
    """Among the surest half of the predictions, the share that the given class contradicts: here, and on rows of another set.

    ``mapped``: score on the other set if each predicted class stood for the class that it most often meets there (another coding).
    """
    y = rows.y[probe.rows]
    kinds = np.unique(rows.y)
    prior = (rows.y[:, None] == kinds[None]).mean(0) if rows.classes else np.zeros(1)
    row: dict[str, Any] = {}
    if rows.classes:
        own = probe.loo(coded(rows, y)).numpy() + prior
        row["contradicted"] = figure(_sure(own, kinds, y))
        place = rows.index[probe.rows] / max(rows.index.max(), 1)
        for name, part in (("head", place < 0.6), ("tail", place > 0.85)):
            if part.sum() >= FEWEST:
                row[name] = figure(_sure(own[part], kinds, y[part]))
    if other is None or bool(other.classes) != bool(rows.classes) or other.x.shape[1] != rows.x.shape[1]:
        return row
    pick = np.linspace(0, len(other.x) - 1, min(len(other.x), MOST)).astype(int)
    pick = pick[np.isin(other.y[pick], kinds)] if rows.classes else pick
    if len(pick) < FEWEST:
        return row
    seen = probe.predict(torch.from_numpy(np.nan_to_num(other.x[pick])).double(), coded(rows, y))
    if not rows.classes:
        return row | {"other_rows": len(pick), "other_score": figure(hits(other, seen, other.y[pick]))}
    scores = seen.numpy() + prior
    told, given = scores.argmax(1), np.searchsorted(kinds, other.y[pick])
    table = np.zeros((len(kinds), len(kinds)))
    np.add.at(table, (told, given), 1)
    return row | {"other_rows": len(pick), "other_score": figure(float((told == given).mean())), "other_contradicted": figure(_sure(scores, kinds, other.y[pick])),
                  "mapped": figure(float(table.max(1).sum() / table.sum())) if len(set(table.argmax(1)[table.sum(1) > 0])) == int((table.sum(1) > 0).sum()) else None}


def _sure(scores: Array, kinds: Array, y: Array) -> float:
    top = np.sort(scores, 1)
    margin = top[:, -1] - top[:, -2] if scores.shape[1] > 1 else top[:, -1]
    sure = margin >= np.median(margin)
    return float((kinds[scores.argmax(1)] != y)[sure].mean())
