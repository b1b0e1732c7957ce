"""The cold side of the writer: owns every file of one rank directory. One thread only, raises ``OSError``, keeps no lock.

``Writer`` takes what is pending and hands it over as a ``Batch``; nothing here runs on the training thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from osler.core.facts import Fact
from osler.core.signals import SCHEMA, STREAMS
from osler.store.codec import to_line
from osler.store.files import write_json, write_text
from osler.store.pyramid import Pyramid, band_dtype
from osler.store.segments import Segments, series_name, write_all

MIB = 1 << 20
FINE = ("layers", "activations", "rows", "batches")
COARSE = ("calls", "steps")
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


@dataclass(slots=True)
class Batch:
    """What one flush writes. ``rows`` must have been taken before the rest, see ``Disk.write``."""

    rows: Mapping[str, bytes | bytearray] = field(default_factory=dict)
    facts: list[bytes] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.facts or self.traces or self.sources)


def claim(directory: Path, rank: int) -> Path:
    """Make the folder of a rank: ``rank-0000``, or ``rank-0000.attempt-2`` when an earlier process has it."""
    directory.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = directory / (f"rank-{rank:04d}" if attempt == 1 else f"rank-{rank:04d}.attempt-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            attempt += 1


class Disk:
    """Files of one process.

    Args:
        directory: the run directory.
        cap_bytes: size at which the oldest fine-grained segments go.
        segment_bytes: size of a full segment.
    """

    def __init__(self, directory: Path, rank: int, cap_bytes: int, segment_bytes: int) -> None:
        self.directory = claim(directory, rank)
        self.cap_bytes = cap_bytes
        self.dropped = 0
        self.step, self.t = 0, 0.0
        self._segment_bytes = segment_bytes
        self._series: dict[str, Segments] = {}
        self._pyramids = {name: Pyramid(s) for name, s in STREAMS.items() if s.pyramid}
        self._fds: dict[str, int] = {}
        self._n_traces = self._n_sources = 0
        self._refused = False
        rows = {name: self._rows(stream.dtype) for name, stream in STREAMS.items()}
        self._other = write_json(self.directory / "store.json",
                                 {"schema": SCHEMA, "pid": os.getpid(), "rank": rank, "segment_rows": rows})

    @property
    def size(self) -> int:
        return self._other + sum(s.size for s in self._series.values())

    def write(self, batch: Batch) -> None:
        """Write a batch, facts before rows.

        As the facts were also taken after the rows, a reader that looks at rows first and facts second never sees a row
        without the facts recorded before it.
        """
        os.stat(self.directory)  # writing to deleted files would succeed unseen
        if batch.facts:
            self._lines("facts.jsonl", b"".join(batch.facts))
        for path, text in batch.sources:
            self._source(path, text)
        for trace in batch.traces:
            self._trace(trace)
        for name, data in batch.rows.items():
            self._append(name, data)
        for series in self._series.values():
            series.count()
        self._shrink()

    def note(self, what: str, text: str) -> None:
        """A fact about ourselves."""
        self._lines("facts.jsonl", to_line(Fact("self", self.step, self.t, data={"what": what, "text": text}).to_json()))

    def close(self) -> None:
        for series in self._series.values():
            series.close()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _rows(self, dtype: np.dtype) -> int:
        return max(16, self._segment_bytes // dtype.itemsize)

    def _append(self, name: str, data: bytes | bytearray) -> None:
        self._to_series(name, STREAMS[name].dtype, data)
        pyramid = self._pyramids.get(name)
        if pyramid is None and name != "steps":
            return
        rows = np.frombuffer(bytes(data), STREAMS[name].dtype)
        if name == "steps":
            self.step, self.t = int(rows["step"][-1]), float(rows["t"][-1])
        if pyramid is not None:
            for level, bands in pyramid.feed(rows):
                self._to_series(series_name(name, level), band_dtype(STREAMS[name]), bands.tobytes())

    def _to_series(self, name: str, dtype: np.dtype, data: bytes | bytearray) -> None:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Segments(self.directory, name, dtype, self._rows(dtype))
        series.append(data)

    def _lines(self, file: str, data: bytes) -> None:
        fd = self._fds.get(file)
        if fd is None:
            fd = self._fds[file] = os.open(self.directory / file, _APPEND, 0o666)
        write_all(fd, data)
        self._other += len(data)

    def _trace(self, trace: dict[str, Any]) -> None:
        try:
            text = to_line(trace).decode("ascii")
        except (ValueError, TypeError, RecursionError) as error:
            self.note("guard", f"trace not recorded: {error}")
            return
        if self._room(len(text)):
            self._other += write_text(self.directory / f"trace-{self._n_traces:04d}.json", text)
            self._n_traces += 1

    def _source(self, path: str, text: str) -> None:
        if not self._room(len(text)):
            return
        base = re.sub(r"[^A-Za-z0-9._-]+", "_", re.split(r"[/\\]", path)[-1])[-60:]
        file = f"sources/{self._n_sources:04d}-{base}"
        (self.directory / "sources").mkdir(exist_ok=True)
        self._other += write_text(self.directory / file, text)
        self._lines("sources.jsonl", to_line({"path": path, "file": file}))
        self._n_sources += 1

    def _room(self, size: int) -> bool:
        """Whether a trace or source fits; these are never dropped later, so they may take half of the cap."""
        if self._other + size <= self.cap_bytes // 2:
            return True
        if not self._refused:
            self._refused = True
            self.note("budget", f"size cap of {_mib(self.cap_bytes)}: further traces and sources are not kept")
        return False

    def _shrink(self) -> None:
        """Delete sealed segments until the cap holds: of the fine streams first, and of the one that takes most."""
        while self.size > self.cap_bytes:
            groups = ([self._series[n] for n in group if n in self._series] for group in (FINE, COARSE))
            full = next((found for g in groups if (found := [s for s in g if s.sealed])), None)
            if full is None:
                return  # only facts, pyramids and open segments are left
            series = max(full, key=lambda s: s.size)
            path, _ = series.drop_oldest()
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                self.note("budget", f"size cap of {_mib(self.cap_bytes)} reached: {self.dropped} old segment(s) deleted so far, "
                                    f"the latest with rows of {series.name!r} ({path.name})")


def _mib(size: int) -> str:
    return f"{size / MIB:.3g} MiB"
