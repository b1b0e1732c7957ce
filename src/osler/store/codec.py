"""Values to bytes: rows by ``struct`` (identical with the numpy dtype of the stream), facts and traces by ``json``.

The fast path is ``struct.Struct.pack``, which is strict; ``Codec.coerce`` is the forgiving path behind it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from osler.core.signals import Stream

_CODES = {"i8": "q", "i4": "i", "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "f8": "d", "f4": "f"}
_F4_MAX = float(np.finfo(np.float32).max)


class Codec:
    """Packs rows of one stream."""

    __slots__ = ("bounds", "dtype", "itemsize", "pack", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.dtype = stream.dtype
        kinds = [np.dtype(c.dtype) for c in stream.columns]
        self.bounds = [None if k.kind == "f" else (int(np.iinfo(k).min), int(np.iinfo(k).max)) for k in kinds]
        layout = struct.Struct("<" + "".join(_CODES[f"{k.kind}{k.itemsize}"] for k in kinds))
        self.itemsize = layout.size
        self.pack = layout.pack

    def coerce(self, values: Sequence[Any]) -> bytes:
        """Bytes of a row that ``pack`` refused: ``None``, floats for integers, numbers out of range.

        A finite value beyond float32 becomes the largest float32, never inf: it must not read as a numerical failure.

        Raises:
            ValueError, TypeError: it is no row of this stream.
        """
        if len(values) != len(self.bounds):
            raise ValueError(f"a row of {self.stream.name!r} has {len(self.bounds)} values, got {len(values)}")
        return self.pack(*map(_number, values, self.bounds))

    def encode(self, array: np.ndarray) -> bytes:
        """Bytes of a structured array; columns go by name where its dtype differs.

        Raises:
            ValueError: a column is missing.
        """
        if array.dtype != self.dtype:
            missing = [c.name for c in self.stream.columns if c.name not in (array.dtype.names or ())]
            if missing:
                raise ValueError(f"rows of {self.stream.name!r} lack the columns {', '.join(missing)}")
            given, array = array, np.empty(array.shape, self.dtype)
            for column in self.stream.columns:
                array[column.name] = given[column.name]
        return array.tobytes()


def _number(value: Any, bounds: tuple[int, int] | None) -> float | int:
    """``value`` as a float column (no bounds) or an integer column can hold it."""
    if bounds is None:
        number = math.nan if value is None else float(value)
        return number if abs(number) <= _F4_MAX or not math.isfinite(number) else math.copysign(_F4_MAX, number)
    low, high = bounds
    if value is None or value != value:
        return -1 if low < 0 else 0
    if value in (math.inf, -math.inf):
        return high if value > 0 else low
    return max(low, min(high, int(value)))


def to_line(obj: Any) -> bytes:
    """One line of JSON with newline. What JSON does not know is written as text rather than refused.

    Raises:
        ValueError, TypeError, RecursionError: the object is circular or has odd keys.
    """
    return json.dumps(obj, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)[:500]
