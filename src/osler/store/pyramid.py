"""Min/max/mean bands: every level summarises 16 bands of the level below, and level 0 are the rows themselves.

``min``, ``max`` and ``mean`` are over the finite values (NaN if there is none); NaN and infinite values are counted beside
them, so a spike, a NaN and an inf stay visible at every zoom. Shapes: ``[n]`` bands, ``[n, c]`` bands by columns.
No files here; see ``disk`` for writing and ``reader`` for views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from osler.core.signals import Stream

FACTOR = 16
TOP = 7
"""Highest level: 16 ** 7 rows a band still fit the 32-bit counts."""

BAND = np.dtype([("first_step", "<i8"), ("last_step", "<i8"), ("count", "<u4"), ("min", "<f8"), ("max", "<f8"),
                 ("mean", "<f8"), ("nan", "<u4"), ("inf", "<u4")])
"""Bands of one column, as views get them."""

_FILE = {"min": "<f4", "max": "<f4", "mean": "<f4", "nan": "<u4", "inf": "<u4"}
_PARTS = (("min", "low"), ("max", "high"), ("mean", "mean"), ("nan", "nan"), ("inf", "inf"))


def band_dtype(stream: Stream) -> np.dtype:
    """Row type of the pyramid files of a stream: steps and count, then ``loss_min``, ``loss_max``, ... for each column."""
    columns = [(f"{name}_{part}", _FILE[part]) for name in stream.pyramid for part, _ in _PARTS]
    return np.dtype([("first_step", "<i8"), ("last_step", "<i8"), ("count", "<u4"), *columns])


@dataclass(frozen=True, slots=True)
class Bands:
    """``first``, ``last``, ``count``: [n]; ``low``, ``high``, ``mean``, ``nan``, ``inf``: [n, c]."""

    first: np.ndarray
    last: np.ndarray
    count: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    nan: np.ndarray
    inf: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, part: slice) -> Bands:
        return Bands(*(getattr(self, f.name)[part] for f in fields(self)))

    @classmethod
    def join(cls, pieces: Sequence[Bands]) -> Bands:
        return cls(*(np.concatenate([getattr(p, f.name) for p in pieces]) for f in fields(cls)))

    @classmethod
    def of_rows(cls, rows: np.ndarray, columns: Sequence[str]) -> Bands:
        """One band a row."""
        steps = rows["step"] if "step" in (rows.dtype.names or ()) else np.full(len(rows), -1, np.int64)
        values = np.empty((len(rows), len(columns)), np.float64)
        for i, name in enumerate(columns):
            values[:, i] = rows[name]
        nan, inf = np.isnan(values), np.isinf(values)
        values[inf] = np.nan
        return cls(steps, steps, np.ones(len(rows), np.int64), values, values, values, nan.astype(np.int64),
                   inf.astype(np.int64))

    def merge(self, group: int) -> Bands:
        """One band for every ``group`` bands; an incomplete last group is a shorter band."""
        if group <= 1 or not len(self):
            return self
        cuts = np.arange(0, len(self), group)
        last = np.append(cuts[1:], len(self)) - 1
        weight = self.count[:, None] - self.nan - self.inf
        total = np.add.reduceat(weight, cuts)
        summed = np.add.reduceat(np.where(weight > 0, self.mean * weight, 0.0), cuts)
        with np.errstate(all="ignore"):  # 0 / 0 is the NaN of a band without a finite value
            mean = summed / total
        return Bands(self.first[cuts], self.last[last], np.add.reduceat(self.count, cuts),
                     np.fmin.reduceat(self.low, cuts), np.fmax.reduceat(self.high, cuts), mean,
                     np.add.reduceat(self.nan, cuts), np.add.reduceat(self.inf, cuts))

    def to_rows(self, columns: Sequence[str], dtype: np.dtype) -> np.ndarray:
        """As written to the files; ``columns`` in the order of the second axis."""
        rows = np.empty(len(self), dtype)
        rows["first_step"], rows["last_step"], rows["count"] = self.first, self.last, self.count
        for i, name in enumerate(columns):
            for part, field in _PARTS:
                rows[f"{name}_{part}"] = getattr(self, field)[:, i]
        return rows

    @classmethod
    def from_rows(cls, rows: np.ndarray, column: str) -> Bands:
        """One column of a pyramid file."""
        parts = {field: rows[f"{column}_{part}"][:, None] for part, field in _PARTS}
        wide = {f: v.astype(np.float64 if v.dtype.kind == "f" else np.int64) for f, v in parts.items()}
        return cls(rows["first_step"], rows["last_step"], rows["count"].astype(np.int64), **wide)

    def column(self) -> np.ndarray:
        """The single column as an array of ``BAND``."""
        rows = np.empty(len(self), BAND)
        rows["first_step"], rows["last_step"], rows["count"] = self.first, self.last, self.count
        for part, field in _PARTS:
            rows[part] = getattr(self, field)[:, 0]
        return rows


class Pyramid:
    """Builds the levels of one stream while its rows go by; keeps at most 15 rows or bands a level."""

    def __init__(self, stream: Stream) -> None:
        self.columns = stream.pyramid
        self.dtype = band_dtype(stream)
        self._rows = np.empty(0, stream.dtype)
        self._pending: dict[int, Bands] = {}

    def feed(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Take the next rows; yields (level, bands that became complete), lower levels first."""
        rows = np.concatenate([self._rows, rows]) if len(self._rows) else rows
        whole = len(rows) // FACTOR * FACTOR
        self._rows = rows[whole:].copy()
        if not whole:
            return
        bands = Bands.of_rows(rows[:whole], self.columns)
        for level in range(1, TOP + 1):
            bands = bands.merge(FACTOR)
            yield level, bands.to_rows(self.columns, self.dtype)
            if level in self._pending:
                bands = Bands.join([self._pending[level], bands])
            whole = len(bands) // FACTOR * FACTOR
            self._pending[level] = bands[whole:]
            if not whole:
                return
            bands = bands[:whole]
