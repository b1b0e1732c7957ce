"""Everything recorded by one process, read incrementally from its rank directory. Runs as a whole are in ``reader``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from osler.core.facts import Fact
from osler.core.signals import STREAMS
from osler.core.trace import Trace
from osler.core.window import End, Window
from osler.store.files import read_json
from osler.store.pyramid import FACTOR, TOP, Bands, band_dtype
from osler.store.segments import parse_name, series_name
from osler.store.tail import Growing, LineTail, RowTail


class Series:
    """The rows of all segments of one series that still exist.

    Attributes:
        skipped: rows of the series before the first one held (deleted by the size cap).
    """

    def __init__(self, directory: Path, name: str, dtype: np.dtype, segment_rows: int) -> None:
        self.name = name
        self.rows = Growing(dtype)
        self.skipped = 0
        self._directory, self._dtype, self._segment_rows = directory, dtype, segment_rows
        self._tails: dict[int, RowTail] = {}
        self._settled: set[int] = set()

    @property
    def damaged(self) -> int:
        return sum(t.damaged for t in self._tails.values())

    def refresh(self, numbers: list[int]) -> bool:
        """Read what is new in the segments that exist now."""
        changed = False
        for number in [n for n in sorted(self._tails) if numbers and n < numbers[0]]:
            # What the cap deleted goes here too: a live run must look like the same run read later.
            self.rows.drop(self._tails.pop(number).rows)
            self._settled.discard(number)
            changed = True
        for number in numbers:
            if number in self._settled:
                continue
            tail = self._tails.get(number)
            if tail is None:
                tail = self._tails[number] = RowTail(self._directory / f"{self.name}-{number:04d}.npy", self._dtype)
            new = tail.read()
            if len(new):
                self.rows.append(new)
                changed = True
            if number < numbers[-1]:
                self._settled.add(number)
        if numbers:
            full = self._segment_rows or max(t.rows for t in self._tails.values())
            self.skipped = numbers[0] * full
        return changed


class RankReader:
    """One rank directory. ``refresh`` reads what is new and never raises for files that are torn or gone."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self._series: dict[str, Series] = {}
        self._segment_rows: dict[str, int] = {}
        self._facts = LineTail(directory / "facts.jsonl")
        self._index = LineTail(directory / "sources.jsonl")
        self._all_facts: list[Fact] = []
        self._traces: dict[str, Trace] = {}
        self._sources: dict[str, str] = {}
        self._damaged = 0
        self._damaged_traces: set[str] = set()

    @property
    def damaged(self) -> int:
        """Segments, lines and traces that could not be read."""
        return (self._damaged + self._facts.damaged + self._index.damaged + len(self._damaged_traces)
                + sum(s.damaged for s in self._series.values()))

    def refresh(self) -> bool:
        """Rows first, then facts: no row is ever seen without the facts recorded before it."""
        try:
            names = sorted(os.listdir(self.directory))
        except OSError:
            return False
        changed = self._read_rows(names, level=False)
        changed |= self._read_facts()
        changed |= self._read_traces([n for n in names if n.startswith("trace-") and n.endswith(".json")])
        return self._read_sources() | changed

    def window(self, run: Mapping[str, Any], end: End | None) -> Window:
        """Everything read so far."""
        streams = {name: self._series[name].rows.view for name in STREAMS if name in self._series}
        traces = tuple(self._traces[name] for name in sorted(self._traces))
        return Window(run, streams, tuple(self._all_facts), traces, dict(self._sources), end, self.rank)

    def bands(self, stream: str, column: str, max_points: int) -> np.ndarray:
        """See ``RunReader.pyramid``."""
        declared = STREAMS[stream]
        levels: list[Series] = []
        if column in declared.pyramid:
            self._read_rows(sorted(os.listdir(self.directory)) if self.directory.is_dir() else [], level=True)
            names = [series_name(stream, level) for level in range(1, TOP + 1)]
            levels = [self._series[n] for n in takewhile(self._series.__contains__, names)]
        raw = self._series.get(stream)
        sizes = [raw.skipped + len(raw.rows) if raw else 0, *(s.skipped + len(s.rows) for s in levels)]
        total = max(n * FACTOR ** level for level, n in enumerate(sizes))
        # One level finer than needed, then merged to the number of points: at least half of them are always used.
        level = next((lv for lv in range(len(sizes)) if total / FACTOR ** lv <= FACTOR * max_points), len(sizes) - 1)
        if level == 0 and raw is not None and raw.skipped and levels:
            level = 1  # the oldest rows are gone, their bands are not
        pieces, at = [], 0
        while True:
            series = raw if level == 0 else levels[level - 1]
            if series is not None:
                held = series.rows.view
                held = held[max(0, at // FACTOR ** level - series.skipped):]
                pieces.append(Bands.of_rows(held, (column,)) if level == 0 else Bands.from_rows(held, column))
                at = max(at, sizes[level] * FACTOR ** level)
            if level == 0:
                break
            level -= 1
        bands = Bands.join(pieces) if pieces else Bands.of_rows(np.empty(0, declared.dtype), (column,))
        return bands.merge(-(-len(bands) // max_points)).column()

    def _read_rows(self, names: list[str], level: bool) -> bool:
        """Refresh the streams, or with ``level`` their pyramids, which nobody but a view needs."""
        present: dict[str, list[int]] = {}
        for series, number in filter(None, map(parse_name, names)):
            if series.split(".")[0] in STREAMS and ("." in series) is level:
                present.setdefault(series, []).append(number)
        if present and not self._segment_rows:
            rows = (read_json(self.directory / "store.json") or {}).get("segment_rows")
            self._segment_rows = {k: v for k, v in rows.items() if isinstance(v, int)} if isinstance(rows, dict) else {}
        changed = False
        for series, numbers in present.items():
            if series not in self._series:
                stream = STREAMS[series.split(".")[0]]
                dtype = band_dtype(stream) if level else stream.dtype
                self._series[series] = Series(self.directory, series, dtype, self._segment_rows.get(series, 0))
            changed |= self._series[series].refresh(sorted(numbers))
        return changed

    def _read_facts(self) -> bool:
        rows = self._facts.read()
        for row in rows:
            try:
                self._all_facts.append(Fact.from_json(row))
            except (KeyError, TypeError, ValueError):
                self._damaged += 1
        return bool(rows)

    def _read_traces(self, names: list[str]) -> bool:
        new = [n for n in names if n not in self._traces and n not in self._damaged_traces]
        for name in new:
            try:
                self._traces[name] = Trace.from_json(read_json(self.directory / name) or {})
            except (KeyError, IndexError, TypeError, ValueError):
                self._damaged_traces.add(name)  # traces appear complete, so it will not heal
        return bool(new)

    def _read_sources(self) -> bool:
        rows = self._index.read()
        for row in rows:
            path, file = row.get("path"), row.get("file")
            try:
                # The index names files below this directory only; it may come from elsewhere.
                if not isinstance(path, str) or not isinstance(file, str) or ".." in Path(file).parts or Path(file).is_absolute():
                    raise ValueError(file)
                self._sources[path] = (self.directory / file).read_text("utf-8", "replace")
            except (OSError, ValueError):
                self._damaged += 1
        return bool(rows)
