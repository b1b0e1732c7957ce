"""``table``: the rows that the run trains on and those it is judged on, compared. Gathering is here, the questions in ``table_questions``.

Runs in a forked copy at a validation forward, while the user's frames are alive: rows come from the data sets of the loaders,
or, without loaders, from tensors and arrays of the user's that hold the rows the model was seen to get. CPU values only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from osler.watch.experiments import column_questions as columns
from osler.watch.experiments import table_questions as ask
from osler.watch.experiments.table_frames import add_vectors, column_names, find_order, from_frames, holdings_of
from osler.watch.experiments.table_rows import Array, Rows, flat, numbers_of, own_numbers, target_of, vector_of
from osler.watch.readout import array

Emit = Callable[[dict[str, Any]], None]
TRAIN_ROWS, JUDGED_ROWS, PATIENCE = 6000, 1000, 1.2


def table(training: list[Any], judging: list[Any], seen: list[tuple[Any, Any]], judged: Any, frame: Any, emit: Emit) -> None:
    """As ``compare``; what it raises becomes a fact."""
    try:
        compare(training, judging, seen, judged, frame, emit)
    except Exception as problem:
        emit({"name": "table", "failed": f"{type(problem).__name__}: {problem}"[:300], "at": None})


def compare(training: list[Any], judging: list[Any], seen: list[tuple[Any, Any]], judged: Any, frame: Any, emit: Emit) -> None:
    """Hands one fact to ``emit``: what the two sides have to do with each other.

    Args:
        training, judging: data sets of the training loaders and of the loader that feeds the validation.
        seen: inputs and targets of a few training steps; ``judged``: the input of the validation forward.
        frame: innermost frame of the user's.
    """
    emit({"begin": "table"})
    begin = perf_counter()
    holdings = dict(holdings_of(frame))
    common: dict[str, float] = {}
    labelled: Rows | None = None
    between = ("", "")
    if training:
        source = "loaders"
        train = _joined([r for d in training[:2] if (r := _from_dataset(d, TRAIN_ROWS)) is not None])
        other = _from_dataset(judging[0], JUDGED_ROWS) if judging else _by_hand(judged, train)
        if judging:
            _common_base(training[0], judging[0], train, other, holdings)
    else:
        source = "tensors"
        sides = from_frames(seen, judged, holdings)
        train, other, common, labelled, between = sides.train, sides.other, sides.common, sides.labelled, sides.between
    if train is None or len(train.x) < 20:
        emit({"name": "table", "unclear": True, "why": "the rows that are trained on were not found", "source": source, "at": None})
        return
    if other is not None and (other.x.shape[1:] != train.x.shape[1:] or len(other.x) < 5):
        other = None
    if other is not None and train.order is None:
        find_order(train, other, holdings)
    row: dict[str, Any] = {"name": "table", "source": source, "train_rows": len(train.x), "judged_rows": len(other.x) if other is not None else 0,
                           "shape": list(train.x.shape[1:]), "dtype": str(train.x.dtype), "common": common, "between": list(between), "at": None}
    told = train if train.y is not None or labelled is None else labelled
    row["column"] = columns.deciding_column(told.x, told.y, column_names(holdings, told))
    row["window_target"] = columns.target_within(told.x, told.y)
    if other is not None:
        row["scales"] = ask.scales(train.x, other.x) if train.x.dtype.kind == "f" else None
        row["overlap"] = ask.overlap(train.x, other.x)
        row["shifted"] = ask.shifted(train.x, other.x)
        if perf_counter() - begin > 2.0:
            emit({**row, "partial": True})
        row["twins"] = ask.twins(train.x, other.x, train.y, other.y)
        row["order"] = ask.neighbours(train, other)
        row["groups"] = [g for name in sorted(set(train.vectors) & set(other.vectors))
                         if (g := ask.group(name, train, other)) is not None][:12]
    row["seconds"] = round(perf_counter() - begin, 4)
    emit(row)


# -- from loaders --------------------------------------------------------------------------------------------------------


def _unwrapped(dataset: Any) -> tuple[Any, Array | None]:
    """The innermost data set and the indices into it."""
    index: Array | None = None
    while isinstance(dataset, Subset) or (type(dataset).__name__ == "Subset" and hasattr(dataset, "indices")):
        own = np.asarray(array(dataset.indices) if isinstance(dataset.indices, torch.Tensor) else dataset.indices)
        index = own if index is None else own[index]
        dataset = dataset.dataset
    return dataset, index


def _from_dataset(dataset: Any, limit: int) -> Rows | None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    base, index = _unwrapped(dataset)
    count = len(dataset)
    if count == 0:
        return None
    chosen = np.arange(count) if count <= limit else np.sort(np.random.default_rng(0).permutation(count)[:limit])
    places = chosen if index is None else index[chosen]
    rows: Rows | None = None
    if type(base) is TensorDataset and base.tensors[0].device.type == "cpu":
        first, last = array(base.tensors[0]), array(base.tensors[-1])
        if first is not None:
            rows = Rows(flat(first[places]), target_of(last[places]) if last is not None and len(base.tensors) > 1 else None)
    if rows is None:
        rows, places = _by_item(base, places)
    if rows is None:
        return None
    rows.order = places if index is not None else None
    for name, value in list(vars(base).items())[:60]:
        for key, thing in _inside(name, value, len(base)):
            vector = vector_of(thing)
            if vector is not None and len(vector) == len(base):
                rows.vectors[key] = vector[places]
    return rows


def _inside(name: str, value: Any, count: int) -> Iterator[tuple[str, Any]]:
    """An attribute itself, the columns of a frame, the fields of a list of records."""
    yield name, value
    if type(value).__name__ == "DataFrame":
        yield from ((str(c), value[c]) for c in list(value.columns)[:60])
    elif isinstance(value, list) and len(value) == count and count and isinstance(value[0], dict):
        yield from ((str(k), [r.get(k) for r in value]) for k, v in value[0].items() if isinstance(v, int | str))


def _by_item(base: Any, places: Array) -> tuple[Rows | None, Array]:
    begin = perf_counter()
    xs: list[Array] = []
    ys: list[Any] = []
    kept: list[int] = []
    named: dict[str, list[int]] = {}
    probes = [int(p) for p in places[:: max(1, len(places) // 4)][:4]]
    idle = own_numbers([_values(base[p]) for p in probes], probes)
    for place in np.random.default_rng(1).permutation(places) if len(places) > 200 else places:
        item = base[int(place)]
        x, y = _parts(item, idle)
        if x is None or (xs and x.shape != xs[0].shape):
            return None, places
        xs.append(x)
        ys.append(y)
        kept.append(int(place))
        for key, value in item.items() if isinstance(item, dict) else ():
            if (number := numbers_of(value)) is not None and number.ndim == 0 and number.dtype.kind in "iu":
                named.setdefault(str(key), []).append(int(number))
        if perf_counter() - begin > PATIENCE or sum(a.size for a in xs[-1:]) * len(xs) > 1 << 24:
            break
    if not xs:
        return None, places
    order = np.argsort(kept)
    targets = np.asarray([ys[i] for i in order]) if all(y is not None and np.shape(y) == np.shape(ys[0]) for y in ys) else None
    vectors = {key: np.asarray(values)[order] for key, values in named.items() if len(values) == len(kept)}
    return Rows(flat(np.stack([xs[i] for i in order])), target_of(targets) if targets is not None else None, None, vectors), np.asarray(kept)[order]


def _values(item: Any) -> list[Any]:
    return list(item.values()) if isinstance(item, dict) else list(item) if isinstance(item, list | tuple) else [item]


def _parts(item: Any, idle: set[int]) -> tuple[Array | None, Any]:
    """Input and target of an item; ``idle`` are the places in it that hold neither."""
    values = [v for k, v in enumerate(_values(item)) if k not in idle] or _values(item)
    label = None
    if isinstance(item, dict):
        label = next((item[k] for k in item if re.search(r"label|target|^y$", str(k))), None)
        if label is None and len(values) > 1 and (last := numbers_of(values[-1])) is not None and last.ndim == 0:
            label = values[-1]
    elif len(values) > 1:
        label = values[-1]
    arrays = [numbers_of(v) for v in values if v is not label or len(values) == 1]
    x = next((a for a in arrays if a is not None and a.size), None)
    return x, numbers_of(label) if label is not None else None


def _by_hand(judged: Any, train: Rows | None) -> Rows | None:
    """Training rows come from a loader, validation rows do not; a batch of the training loader is no validation."""
    given = numbers_of(judged)
    if given is None or train is None or len(train.x) >= TRAIN_ROWS or given.ndim < 2 or given.shape[1:] != train.x.shape[1:]:
        return None
    rows = flat(given)
    return Rows(rows) if np.isin(ask.keys(rows), ask.keys(train.x)).mean() < 0.98 else None


def _common_base(training: Any, judging: Any, train: Rows | None, other: Rows | None, holdings: dict[str, Any]) -> None:
    """Places count only where both sides are parts of one data set; data sets that keep their own positions tell them."""
    if train is None or other is None:
        return
    a, b = _unwrapped(training)[0], _unwrapped(judging)[0]
    if a is b:
        add_vectors(train, other, len(a), holdings)
    else:
        train.order = other.order = None
        for name in set(train.vectors) & set(other.vectors):
            if re.search(r"start|index|indices|idx|pos|offset|time|^t$|date|ids?$|anchor", name) and train.vectors[name].dtype.kind in "iu" \
                    and not re.search(r"user|item|word|token", name) and not np.isin(other.vectors[name], train.vectors[name]).any():
                train.order, other.order = train.vectors[name], other.vectors[name]
                return


def _joined(parts: list[Rows]) -> Rows | None:
    if not parts or len(parts) == 1 or len({p.x.shape[1:] for p in parts}) > 1:
        return parts[0] if parts else None
    y = np.concatenate([p.y for p in parts if p.y is not None]) if all(p.y is not None for p in parts) else None
    return Rows(np.concatenate([p.x for p in parts]), y)
