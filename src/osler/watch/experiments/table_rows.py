"""One side of a split as plain arrays (see ``table``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from osler.watch.readout import array

Array = np.ndarray[Any, Any]
MAX_COLUMNS = 4096


@dataclass
class Rows:
    """One side of the split: inputs [rows, ...], one target a row, the place of each row in the whole table where that is known."""

    x: Array
    y: Array | None = None
    order: Array | None = None
    vectors: dict[str, Array] = field(default_factory=dict)


def numbers_of(value: Any) -> Array | None:
    if isinstance(value, torch.Tensor):
        found = None if value.device.type != "cpu" or value.is_sparse else array(value)
    elif isinstance(value, np.ndarray | np.generic | int | float | bool):
        found = np.asarray(value)
    elif type(value).__name__ in ("DataFrame", "Series"):
        found = (value.select_dtypes("number") if hasattr(value, "select_dtypes") else value).to_numpy()
    else:
        return None
    if found is None or found.dtype.kind not in "fiub":
        return None
    checked: Array = found
    return checked


def own_numbers(items: list[list[Any]], places: list[int]) -> set[int]:
    """Positions at which every item holds nothing but its own place in the data set, for whoever looks rows up again: neither input nor target."""
    found = set()
    for k in range(min(map(len, items), default=0)) if len(set(places)) >= 3 else ():
        values = [numbers_of(item[k]) for item in items]
        if all(v is not None and v.size == 1 and v.dtype.kind in "iu" and int(v.reshape(-1)[0]) == place for v, place in zip(values, places, strict=True)):
            found.add(k)
    return found


def vector_of(value: Any) -> Array | None:
    """One entry a row: whole numbers, flags or words."""
    if isinstance(value, list) and len(value) >= 20 and isinstance(value[0], int | str):
        value = np.asarray(value)
    if type(value).__name__ == "Series":
        value = value.to_numpy()
    found = array(value) if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_sparse else value
    if not isinstance(found, np.ndarray) or found.ndim != 1 or len(found) < 20:
        return None
    if found.dtype.kind == "O" and all(isinstance(v, str) for v in found[:50]):
        found = found.astype(str)
    words: Array = np.unique(found, return_inverse=True)[1] if found.dtype.kind in "US" else found
    return words if words.dtype.kind in "biu" else None


def flat(x: Array) -> Array:
    """Rows as float32 [rows, ...] with at most ``MAX_COLUMNS`` numbers each."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    x = x[:, None] if x.ndim == 1 else x
    if x[0].size > MAX_COLUMNS:
        flat = x.reshape(len(x), -1)
        x = flat[:, :: flat.shape[1] // MAX_COLUMNS][:, :MAX_COLUMNS]
    found: Array = np.nan_to_num(x, nan=-12345.0, posinf=1e30, neginf=-1e30)
    return found


def target_of(y: Array) -> Array:
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
