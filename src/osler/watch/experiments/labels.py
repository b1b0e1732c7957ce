"""``label-dependence``: can the targets be told from the inputs at all, and would another pairing of the same rows tell them better?

A kernel ridge regression on the training rows; its leave-one-out predictions for any number of re-pairings come from one factorisation. The
yardstick is the same figure for targets in random order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.rowset import (
    FEWEST,
    WIDE,
    Array,
    RowSet,
    held,
    matched,
    numeric,
    of_arrays,
    of_collated,
    of_dataset,
)
from osler.watch.experiments.subject import Emit, figure

MOST = 700
DRAWS = 24
RIDGE = 0.3
SHIFTS = (1, -1, 2, -2, 3, -3)
MAX_CLASSES = 60
NAMED = re.compile(r"^(y|t)(_?(tr|train|all|full|data))?$|label|target", re.I)


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


def dependence(rows: RowSet) -> tuple[dict[str, Any], Probe] | None:
    """Score of the pairing as it is, of random pairings, and of the neighbours' targets."""
    chosen = chosen_rows(rows)
    y = rows.y[chosen]
    if len(chosen) < FEWEST or (rows.classes == 1) or rows.classes > MAX_CLASSES or not np.isfinite(rows.y).all() or (rows.classes == 0 and np.ptp(y) == 0):
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
        row["contradicted"] = figure(_sure(probe.loo(coded(rows, y)).numpy() + prior, kinds, y))
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


def repaired(rows: RowSet, probe: Probe, arrays: dict[str, Array]) -> tuple[str, float] | None:
    """Another order or another array of targets in memory that the inputs tell best."""
    chosen = probe.rows
    best: tuple[str, float] | None = None
    for name, y in _pairings(rows, arrays):
        value = hits(rows, probe.loo(coded(rows, y[chosen])), y[chosen])
        if best is None or value > best[1]:
            best = (name, value)
    return best


def _pairings(rows: RowSet, arrays: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    if len(rows.index) != rows.total or rows.y.ndim != 1:
        return
    n = rows.total
    alike = {name: a.reshape(-1) for name, a in arrays.items() if a.size == len(a) and _same_kind(rows, a.reshape(-1))}
    orders = {name: a for name, a in arrays.items() if a.ndim == 1 and a.dtype.kind in "iu" and len(a) >= n and np.array_equal(np.sort(a), np.arange(len(a)))}
    for name, y in [("", rows.y), *alike.items()][:12]:
        if name and len(y) == n and not np.array_equal(y, rows.y):
            yield name, y
        for order, p in list(orders.items())[:6]:
            if len(p) != len(y):
                continue
            for text, index in ((f"[{order}]", p), (f"[argsort({order})]", np.argsort(p))):
                for part in {0, len(p) - n}:
                    yield f"{name}{text}", y[index][part:part + n]


def _same_kind(rows: RowSet, y: Array) -> bool:
    if len(y) < rows.total or not np.isfinite(y).all():
        return False
    if rows.classes:
        kinds = np.unique(y)
        return len(kinds) >= 2 and len(kinds) <= MAX_CLASSES and bool(np.isin(kinds, np.unique(rows.y)).all())
    return y.dtype.kind == "f" and bool(abs(float(np.mean(y)) - float(np.mean(rows.y))) < float(np.std(rows.y)) + 1e-9)


def label_dependence(capture: Capture, emit: Emit, seconds: float = 1.0) -> list[RowSet]:
    """Writes one fact for the rows that the captured batch comes from; gives the row sets that were read, the training rows first.

    Where a training loader is known, its data set is read; else the user's arrays that hold the batch's rows.
    """
    begin = perf_counter()
    arrays = held()
    sets = [(i, found) for i, loader in capture.loaders if (found := _read(loader, 0.5 * seconds)) is not None]
    sets.sort(key=lambda pair: pair[0] != capture.active)
    train: RowSet | None = sets[0][1] if sets and sets[0][0] == capture.active else None
    row: dict[str, Any] = {"loader": capture.active if train is not None else -1, "paired": None, "pair": None}
    hits_in = list(matched(capture, arrays))
    target = _batch_target(capture)
    if target is not None and hits_in:
        row |= _paired(arrays, hits_in, target, capture)
    if row["pair"] is None and train is None and target is None and hits_in:
        # A loss written by hand shows no target: take what goes by the name of one.
        named = [n for n, a in arrays.items() if len(a) == len(hits_in[0][1]) and a.size == len(a) and NAMED.match(n.split(".")[-1]) and n != hits_in[0][0]]
        row |= {"inputs": hits_in[0][0], "pair": named[0] if len(named) == 1 else None, "by_name": True}
    if train is None and row["pair"] is not None and hits_in:
        train = of_arrays(arrays[row["inputs"]], arrays[row["pair"]], row["inputs"])
    if train is None and hits_in:
        alone = of_arrays(hits_in[0][1], np.zeros(len(hits_in[0][1]), np.float32), hits_in[0][0])
        return [alone] if alone is not None else []
    if train is None:
        return []
    others = [found for i, found in sets if i != capture.active and found.x.shape[1] == train.x.shape[1] and bool(found.classes) == bool(train.classes)]
    others += _by_name(arrays, train)
    result = dependence(train)
    if result is not None:
        figures, probe = result
        row |= figures
        other = next((o for o in others if not _overlaps(train, o)), None)
        row |= contradictions(train, probe, other)
        if other is not None and (own := dependence(other)) is not None:
            row |= {"other_own_score": own[0]["score"], "other_own_null": own[0]["null"], "other_own_z": own[0]["z"], "other": other.name}
        if (best := repaired(train, probe, arrays)) is not None:
            row |= {"repair": best[0], "repair_score": figure(best[1]), "repair_z": figure((best[1] - figures["null"]) / figures["spread"])}
    if result is not None or row["pair"] is not None:
        emit({"name": "label-dependence", "seconds": round(perf_counter() - begin, 4), "at": None, **row})
    return [train, *others]


def _read(loader: Any, seconds: float) -> RowSet | None:
    try:
        return of_collated(loader, seconds) or of_dataset(getattr(loader, "dataset", None), seconds)
    except Exception:
        return None


def _batch_target(capture: Capture) -> Array | None:
    return numeric(capture.target) if capture.target is not None and capture.target.dim() >= 1 else None


def _paired(arrays: dict[str, Array], places: list[tuple[str, Array, npt.NDArray[np.int64]]], target: Array, capture: Capture) -> dict[str, Any]:
    """Which array of targets belongs to the rows of the batch, and how much of the batch's target agrees with it."""
    found: dict[str, Any] = {}
    targets = [numeric(t) for t in (capture.targets or [capture.target]) if t is not None]
    best = -1.0
    for x_name, x, index in places:
        for name, y in arrays.items():
            if len(y) != len(x) or name == x_name or y.size // len(y) != target.size // len(target) or len(target) != len(index) or y.size > len(y) * WIDE:
                continue
            if (y.dtype.kind != target.dtype.kind and {y.dtype.kind, target.dtype.kind} != {"i", "u"}) or not np.isin(np.unique(target)[:50], y).all():
                continue
            share = max(float((y[index].reshape(len(index), -1) == t.reshape(len(index), -1)).all(1).mean()) for t in targets
                        if t is not None and t.size == target.size)
            if share > best:
                best = share
                found = {"inputs": x_name, "pair": name, "paired": figure(share)}
                values = y.reshape(len(y), -1)[:, 0]
                chance = float((values[:, None][:2000] == values[None, :2000]).mean())
                found["chance"] = figure(chance)
                found["batch"] = len(index)
    return found


def _by_name(arrays: dict[str, Array], train: RowSet) -> list[RowSet]:
    """``X_val`` and ``y_val``: rows kept apart, found by their names."""
    found = []
    for name, x in arrays.items():
        if x.size // len(x) != train.x.shape[1] or name == train.name:
            continue
        for said, meant in (("x", "y"), ("x", "t"), ("images", "labels"), ("images", "targets"), ("inputs", "targets"), ("features", "targets"), ("features", "labels"), ("data", "labels")):
            y = next((a for n, a in arrays.items() if n.lower() == name.lower().replace(said, meant, 1) and n != name), None)
            if y is not None and len(y) == len(x) and y.size == len(y) and _like(train, y.reshape(-1)):
                rows = of_arrays(x, y, name)
                if rows is not None:
                    found.append(rows)
                break
    return sorted(found, key=lambda r: -r.total)


def _like(train: RowSet, y: Array) -> bool:
    return bool(np.isin(np.unique(y), np.unique(train.y)).all()) if train.classes else y.dtype.kind == "f"


def _overlaps(a: RowSet, b: RowSet) -> bool:
    """The second set is (a part of) the first: an evaluation on training rows says nothing here."""
    rows = {r.tobytes() for r in a.x}
    return float(np.mean([r.tobytes() in rows for r in b.x[:500]])) > 0.5

