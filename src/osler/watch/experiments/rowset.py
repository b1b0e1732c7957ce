"""The rows a training run uses, as far as the process holds them: items of a loader's data set, or arrays that the user's frames hold.

Only ever used inside the forked copy. Nothing is drawn from a loader's iterator.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.nested import leaves
from osler.watch.experiments.table_rows import own_numbers
from osler.watch.taps.loader import fingerprints
from osler.watch.where import is_user

Array = npt.NDArray[Any]
FEWEST = 60
LARGEST = 20_000_000
BLOCKS = 8
ITEMS = 1600
WIDE = 4096
TARGET = re.compile(r"label|target|^y$|class", re.I)


@dataclass(frozen=True)
class RowSet:
    """Rows in the order of their source.

    Attributes:
        x: features [rows, columns] as float32; y: targets [rows] or [rows, columns].
        classes: distinct integer targets, 0 for a measured quantity.
        index: position of each row in its source; neighbours there are neighbours here.
        total: rows of the source; name: what it is called, or its class.
        all_y: targets of every position of the source, where they are at hand.
    """

    x: Array
    y: Array
    classes: int
    index: npt.NDArray[np.int64]
    total: int
    name: str
    all_y: Array | None = None


def numeric(value: Any) -> Array | None:
    """A CPU tensor, array, number, or image-like object as an array of numbers."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided or value.is_complex() or type(value) is not torch.Tensor:
            return None
        value = value.detach()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "fiub" else None
    if isinstance(value, bool | int | float | np.generic):
        array = np.asarray(value)
        return array if array.dtype.kind in "fiub" else None
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return None


def parts(item: Any) -> list[Array]:
    """The numeric parts of one item of a data set, in order; a list of numbers inside the item is one part."""
    queue: list[Any] = [item]
    found: list[Array] = []
    while queue and len(found) < 12:
        value = queue.pop(0)
        if value is not item and isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
            found.append(np.asarray(value))
            continue
        if isinstance(value, dict):
            queue[:0] = [v for _, v in sorted(value.items(), key=lambda pair: bool(TARGET.search(str(pair[0]))))]
        elif isinstance(value, list | tuple) and len(value) <= 12 and any(numeric(v) is not None or isinstance(v, list | tuple | dict) for v in value):
            queue[:0] = list(value)
        else:
            array = numeric(value)
            if array is not None:
                found.append(array)
    return found


def features(rows: list[Array]) -> Array | None:
    """[rows, columns]: numbers as they are, tokens as counts, sequences of unequal length by their moments."""
    shapes = {r.shape for r in rows}
    if (len(shapes) == 1 and rows[0].dtype.kind == "f") or (len(shapes) == 1 and rows[0].dtype == np.uint8):
        flat = np.stack([r.reshape(-1) for r in rows]).astype(np.float32)
        return flat if flat.shape[1] <= WIDE else flat[:, :: flat.shape[1] // WIDE + 1]
    if all(r.dtype.kind in "iub" and r.ndim == 1 for r in rows):
        top = int(max((int(r.max()) for r in rows if r.size), default=0)) + 1
        if len(shapes) == 1 and (rows[0].size <= 8 or top > 20000 or min(int(r.min()) for r in rows) < 0):
            return np.stack(rows).astype(np.float32)
        if top > 20000 or any(r.size and r.min() < 0 for r in rows):
            return None
        counts = np.zeros((len(rows), min(top, 512)), np.float32)
        for i, r in enumerate(rows):
            counts[i] = np.bincount(r.astype(np.int64) % counts.shape[1], minlength=counts.shape[1])
        return np.sqrt(counts)
    if len(shapes) == 1:
        return np.stack([r.reshape(-1)[:WIDE] for r in rows]).astype(np.float32)
    moments = [(float(r.mean()), float(r.std()), float(np.abs(r).max()), float(r.shape[0])) if r.size else (0.0, 0.0, 0.0, 0.0) for r in rows if r.ndim]
    return np.asarray(moments, np.float32) if len(moments) == len(rows) else None


def labels(rows: list[Array]) -> tuple[Array, int] | None:
    """Targets and the number of classes; maps and vectors are thinned to a few columns."""
    if len({r.shape for r in rows}) != 1:
        return None
    y = np.stack([r.reshape(-1) for r in rows])
    if y.shape[1] == 0:
        return None
    if y.shape[1] == 1 and y.dtype.kind in "iub":
        return y[:, 0].astype(np.int64), len(np.unique(y))
    if y.shape[1] == 1 and np.isfinite(y).all() and (y == np.round(y)).all() and len(np.unique(y)) <= 20:
        return y[:, 0].astype(np.int64), len(np.unique(y))
    y = y.astype(np.float32)
    if y.shape[1] > 16:
        width = y.shape[1] // 8
        y = np.stack([y[:, i * width:(i + 1) * width].mean(1) for i in range(8)], 1)
    return y, 0


def of_dataset(dataset: Any, seconds: float) -> RowSet | None:
    """Items of a map-style data set: all of them if that is quick, else a few stretches of neighbours."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    total, name = len(dataset), type(dataset).__name__
    if total < FEWEST:
        return None
    quick = _tensors(dataset)
    if quick is not None:
        x, y, index = quick
        made = made_of(list(x[index]), list(y[index]), index, total, name)
        every = labels(list(y)) if made is not None and len(y) < 200_000 else None
        return replace(made, all_y=every[0]) if made is not None and every is not None and every[0].ndim == made.y.ndim else made
    first = parts(dataset[0])
    begin = process_time()
    again = parts(dataset[min(1, total - 1)])
    each = process_time() - begin + 1e-6
    if len(first) < 2 or len(again) != len(first):
        return None
    places = [0, 1, 7, 23]
    idle = own_numbers([first, again, *(parts(dataset[i]) for i in places[2:])], places) if len(first) >= 3 else set()
    kept = [k for k in range(len(first)) if k not in idle]
    if len(kept) < 2:
        return None
    most = int(seconds / each)
    if most < FEWEST:
        return None
    if most >= total or total <= 200:
        index = np.arange(total)
    else:
        length = min(most, ITEMS) // BLOCKS
        starts = np.linspace(0, total - length, BLOCKS).astype(int)
        index = np.unique(np.concatenate([np.arange(s, s + length) for s in starts]))
    xs: list[Array] = []
    ys: list[Array] = []
    begin, start = process_time(), perf_counter()
    for number, i in enumerate(index):
        found = parts(dataset[int(i)])
        if len(found) != len(first):
            return None
        xs.append(found[kept[0]])
        ys.append(found[kept[-1]])
        if number & 63 == 63 and (process_time() - begin > 1.5 * seconds or perf_counter() - start > 4 * seconds):
            break
    return made_of(xs, ys, index[: len(xs)], total, name)


def _tensors(dataset: Any) -> tuple[Array, Array, npt.NDArray[np.int64]] | None:
    """The first and the last tensor of a ``TensorDataset``, and which of their rows, in order, a ``Subset`` around it takes."""
    index: Any = None
    for _ in range(3):
        if isinstance(dataset, Subset):
            own = np.asarray(list(dataset.indices))
            index = own if index is None else own[index]
            dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset.tensors) < 2:
        return None
    x, y = numeric(dataset.tensors[0]), numeric(dataset.tensors[-1])
    if x is None or y is None or x.size > LARGEST or y.size > LARGEST:
        return None
    return x, y, np.arange(len(x)) if index is None else np.sort(index)


def made_of(xs: list[Array], ys: list[Array], index: Array, total: int, name: str) -> RowSet | None:
    x, target = features(xs), labels(ys)
    if x is None or target is None or len(x) != len(target[0]) or x.shape[1] == 0:
        return None
    return RowSet(x, target[0], target[1], index.astype(np.int64), total, name)


# -- arrays of the user's frames ------------------------------------------------------------------------------------


def held() -> dict[str, Array]:
    """Arrays with many rows in the variables of the user's frames, and in the attributes of objects there."""
    found: dict[str, Array] = {}
    seen: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user(frame.f_code):
            for scope in (frame.f_locals, frame.f_globals):
                for name, value in list(scope.items()):
                    if not name.startswith("__"):
                        _keep(found, seen, name, value, 0)
        frame = frame.f_back
    return found


def _keep(found: dict[str, Array], seen: set[int], name: str, value: Any, depth: int) -> None:
    if id(value) in seen or len(found) > 80:
        return
    seen.add(id(value))
    array = numeric(value) if isinstance(value, torch.Tensor | np.ndarray) else None
    if array is None and isinstance(value, list) and len(value) >= FEWEST:
        array = _of_list(value)
    if array is not None:
        if array.ndim and array.dtype.kind in "fiub" and len(array) >= FEWEST and array.size <= LARGEST:
            found.setdefault(name, array)
    elif depth < 2 and isinstance(value, dict | list | tuple) and len(value) <= 16:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _keep(found, seen, f"{name}[{key!r}]", item, depth + 1)
    elif depth < 2 and hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module | torch.optim.Optimizer) and _users(type(value)):
        for key, item in list(vars(value).items())[:40]:
            _keep(found, seen, f"{name}.{key}", item, depth + 1)


def _of_list(values: list[Any]) -> Array | None:
    """A list of numbers, or of equally shaped tensors and arrays, as one array."""
    first = values[0]
    try:
        if isinstance(first, int | float) and not isinstance(first, bool):
            return np.asarray(values)
        if isinstance(first, torch.Tensor | np.ndarray) and first.size != 0 and len(values) < 20_000:
            rows = [numeric(v) for v in values]
            if all(r is not None and r.shape == first.shape for r in rows) and len(rows) * rows[0].size <= LARGEST:  # type: ignore[union-attr]
                return np.stack(rows)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        pass
    return None


def _users(kind: type) -> bool:
    """A class of the user's own files."""
    return any(is_user(f.__code__) for f in list(vars(kind).values())[:20] if isinstance(f, FunctionType))


def matched(capture: Capture, arrays: dict[str, Array]) -> Iterator[tuple[str, Array, npt.NDArray[np.int64]]]:
    """Arrays whose rows make up the captured batch: name, array, row number of each sample of the batch."""
    inputs = [t for _, t in leaves((capture.args, capture.kwargs)) if t.dim() >= 1 and t.shape[0] >= 4 and t.device.type == "cpu"]
    if not inputs or (batch := _prints(inputs[0])) is None or len(np.unique(batch)) < 0.7 * len(batch):
        return
    width = inputs[0].numel() // inputs[0].shape[0]
    fitting = sorted((item for item in arrays.items() if item[1].size // len(item[1]) == width), key=lambda item: -len(item[1]))[:6]
    for name, array in fitting:
        if len(array) < len(batch) or (len(array) == len(batch) and len(fitting[0][1]) > len(batch)):
            continue
        own = _prints(torch.from_numpy(np.ascontiguousarray(array)))
        if own is None:
            continue
        order = np.argsort(own, kind="stable")
        place = np.searchsorted(own[order], batch).clip(0, len(own) - 1)
        rows = order[place]
        if (own[rows] == batch).mean() > 0.95 and len(np.unique(own)) > 0.9 * len(own):
            yield name, array, rows.astype(np.int64)


def _prints(tensor: torch.Tensor) -> Any:
    return fingerprints(tensor.reshape(tensor.shape[0], -1))


def of_arrays(x: Array, y: Array, name: str) -> RowSet | None:
    return made_of(list(x), list(y), np.arange(len(x)), len(x), name)
