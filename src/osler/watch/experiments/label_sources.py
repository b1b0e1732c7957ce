"""Which rows ``label-dependence`` is asked of, and which other pairings of them the process holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.labels import MAX_CLASSES, Probe, apart, coded, contradictions, dependence, hits
from osler.watch.experiments.nested import leaves
from osler.watch.experiments.rowset import (
    FEWEST,
    ITEMS,
    WIDE,
    Array,
    RowSet,
    features,
    held,
    labels,
    made_of,
    matched,
    numeric,
    of_arrays,
    of_dataset,
    parts,
)
from osler.watch.experiments.subject import Emit, figure
from osler.watch.where import is_user

NAMED = re.compile(r"^(y|t)(_?(tr|train|all|full|data))?$|label|target", re.I)


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
        if name and not _same_labels(y, rows.y):
            continue  # labels of another task
        if name and len(y) == n and not np.array_equal(y, rows.y):
            yield name, y
        for order, p in list(orders.items())[:6]:
            if len(p) != len(y):
                continue
            for text, index in ((f"[{order}]", p), (f"[argsort({order})]", np.argsort(p))):
                for part in {0, len(p) - n}:
                    yield f"{name}{text}", y[index][part:part + n]


def _same_labels(y: Array, used: Array) -> bool:
    n = len(used)
    return np.array_equal(y[:n], used) or np.array_equal(y[-n:], used) or (len(y) == n and np.array_equal(np.sort(y), np.sort(used)))


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
    if train is not None and target is not None and (share := _kept(train, capture)) is not None:
        row["kept"] = figure(share)
    if min(row.get("kept") or 1.0, 1.0 if row["paired"] is None else row["paired"]) < 0.9 and target is not None:
        row["batch_z"] = _batch_alone(capture, target)
    if row["pair"] is None and train is None and target is None and hits_in:
        # A loss written by hand shows no target: take what goes by the name of one.
        named = [n for n, a in arrays.items() if len(a) == len(hits_in[0][1]) and a.size == len(a) and NAMED.match(n.split(".")[-1]) and n != hits_in[0][0]]
        row |= {"inputs": hits_in[0][0], "pair": named[-1] if named else None, "by_name": True}
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
        if other is not None:
            row["apart"] = figure(apart(probe, other))
        if other is not None and (own := dependence(other)) is not None:
            row |= {"other_own_score": own[0]["score"], "other_own_null": own[0]["null"], "other_own_z": own[0]["z"], "other": other.name}
        if (best := repaired(train, probe, arrays)) is not None:
            row |= {"repair": best[0], "repair_score": figure(best[1]), "repair_z": figure((best[1] - figures["null"]) / figures["spread"])}
    if result is not None or row["pair"] is not None:
        emit({"name": "label-dependence", "seconds": round(perf_counter() - begin, 4), "at": None, **row})
    return [train, *others]


def of_collated(loader: Any, seconds: float) -> RowSet | None:
    """Rows of batches that the loader's own ``collate_fn`` makes of neighbouring items; ``None`` for torch's own."""
    dataset, collate, size = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None), getattr(loader, "batch_size", None)
    if not callable(collate) or not is_user(getattr(collate, "__code__", _NOTHING)) or not size or isinstance(dataset, IterableDataset) \
            or dataset is None or not hasattr(dataset, "__len__"):
        return None
    xs: list[Array] = []
    ys: list[Array] = []
    begin, began = perf_counter(), process_time()
    for start in range(0, len(dataset) - size + 1, size):
        found = [p for p in parts(collate([dataset[i] for i in range(start, start + size)])) if p.ndim and len(p) == size]
        found = [p for p in found if not (p.ndim == 1 and p.dtype.kind in "iu" and np.array_equal(p, np.arange(start, start + size)))]
        if len(found) < 2:
            return None
        xs.extend(found[0])
        ys.extend(found[-1])
        if len(xs) >= ITEMS or process_time() - began > seconds or perf_counter() - begin > 4 * seconds:
            break
    return made_of(xs, ys, np.arange(len(xs)), len(dataset), type(dataset).__name__) if len(xs) >= FEWEST else None


_NOTHING = compile("", "<osler>", "exec")


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


def _batch_alone(capture: Capture, target: Array, least: int = 24) -> float | None:
    """Whether the batch's targets can be told from its own rows: then they are another task's, not another row's."""
    inputs = next((t for _, t in leaves((capture.args, capture.kwargs)) if t.dim() >= 2 and t.device.type == "cpu"), None)
    if inputs is None or len(inputs) != len(target) or len(inputs) < least:
        return None
    rows = of_arrays(numeric(inputs), target, "batch")  # type: ignore[arg-type]
    found = dependence(rows, least) if rows is not None else None
    return found[0]["z"] if found is not None else None


def _kept(train: RowSet, capture: Capture) -> float | None:
    """Share of the batch's targets that are those of its rows in the data set; ``None`` where the rows are not found there (augmented,
    mixed) or repeat."""
    inputs = [t for _, t in leaves((capture.args, capture.kwargs)) if t.dim() >= 2 and t.device.type == "cpu"]
    if not inputs or len(train.index) != train.total or train.y.ndim != 1:
        return None
    batch = features(list(numeric(inputs[0])))  # type: ignore[arg-type]
    if batch is None or batch.shape[1] != train.x.shape[1] or len(batch) < 8:
        return None
    place = {r.tobytes(): i for i, r in enumerate(train.x)}
    rows = [place.get(r.tobytes()) for r in batch]
    if any(r is None for r in rows) or len(place) < 0.95 * len(train.x):
        return None
    own = train.y[np.asarray(rows)]
    shares = []
    for target in capture.targets or [capture.target]:
        given = numeric(target)
        if given is not None and given.ndim and len(given) == len(own) and (made := labels(list(given))) is not None and made[0].shape == own.shape:
            shares.append(float((made[0] == own).mean()))
    return max(shares, default=None)


def _by_name(arrays: dict[str, Array], train: RowSet) -> list[RowSet]:
    """``X_val`` and ``y_val``: rows kept apart, found by their names."""
    found = []
    for name, x in arrays.items():
        if x.size // len(x) != train.x.shape[1] or name == train.name:
            continue
        for said, meant in (("x", "y"), ("x", "t"), ("images", "labels"), ("images", "targets"), ("inputs", "targets"), ("features", "targets"), ("features", "labels"), ("data", "labels"), ("feats", "labels"), ("feat", "lab"), ("imgs", "labels"), ("inputs", "labels"), ("seqs", "labels")):
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

