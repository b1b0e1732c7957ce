"""Reads a run directory, live or finished, whole or torn, and keeps up with it: ``refresh`` reads only what is new."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from osler.core.errors import RunNotFound, RunUnreadable, UsageError
from osler.core.signals import SCHEMA, STREAMS
from osler.core.window import End, Window
from osler.store.files import read_json
from osler.store.rank import RankReader
from osler.store.runs import describe_newest

_RANK = re.compile(r"rank-(\d{4,})(?:\.attempt-(\d+))?")


class RunReader:
    """A run directory.

    Ranks are read when first asked for, so a view of rank 0 does not load the other 63.

    Raises:
        RunNotFound: the directory is no run.
        RunUnreadable: its ``run.json`` is damaged or of a newer schema.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.run: Mapping[str, Any] = {}
        self.end: End | None = None
        self._stamp: tuple[int, int] | None = None
        self._readers: dict[tuple[int, int], RankReader] = {}
        self._seen: dict[int, int] = {}
        self._read_run()
        self._read_end()
        self._seen = self._attempts()

    @property
    def damaged(self) -> int:
        """Segments, lines and traces that could not be read so far."""
        return sum(r.damaged for r in self._readers.values())

    def ranks(self) -> list[int]:
        """Ranks that have recorded something."""
        return sorted(self._attempts())

    def attempts(self, rank: int = 0) -> int:
        """How many processes have recorded as this rank (more than one after an elastic restart)."""
        return self._attempts().get(rank, 0)

    def refresh(self) -> bool:
        """Read what is new of the run and of every rank asked for so far; returns whether there was anything.

        The end is read first: a window with an end holds everything.
        """
        before = (self._stamp, self.end, self._seen)
        self._read_run()
        self._read_end()
        self._seen = self._attempts()
        changed = before != (self._stamp, self.end, self._seen)
        for reader in self._readers.values():
            changed |= reader.refresh()
        return changed

    def window(self, rank: int = 0, attempt: int | None = None) -> Window:
        """Everything read so far of one process, by default the latest that ran as this rank; empty if none did."""
        reader = self._reader(rank, attempt)
        return reader.window(self.run, self.end) if reader is not None else Window(self.run, end=self.end, rank=rank)

    def pyramid(self, stream: str, column: str, max_points: int = 2000, rank: int = 0, attempt: int | None = None) -> np.ndarray:
        """Bands of a column over the whole run, at most ``max_points``, as an array of ``osler.store.pyramid.BAND``.

        Columns without a pyramid are reduced from the rows. Rows that the size cap deleted are still in the bands.

        Raises:
            UsageError: no such stream or column.
        """
        known = [c.name for c in STREAMS[stream].columns] if stream in STREAMS else list(STREAMS)
        if stream not in STREAMS or column not in known:
            raise UsageError(f"no signal {stream}/{column}; known: {', '.join(known)}")
        reader = self._reader(rank, attempt)
        empty = RankReader(self.directory / "none", rank)
        return (reader or empty).bands(stream, column, max(1, max_points))

    def _reader(self, rank: int, attempt: int | None) -> RankReader | None:
        number = attempt if attempt is not None else self._seen.get(rank, 0)
        if not 0 < number <= self._seen.get(rank, 0):
            return None
        key = (rank, number)
        if key not in self._readers:
            name = f"rank-{rank:04d}" if number == 1 else f"rank-{rank:04d}.attempt-{number}"
            self._readers[key] = RankReader(self.directory / name, rank)
            self._readers[key].refresh()
        return self._readers[key]

    def _attempts(self) -> dict[int, int]:
        found: dict[int, int] = {}
        try:
            names = [p.name for p in self.directory.iterdir()]
        except OSError:
            return dict(self._seen)
        for match in filter(None, map(_RANK.fullmatch, names)):
            rank = int(match[1])
            found[rank] = max(found.get(rank, 0), int(match[2] or 1))
        return found

    def _read_run(self) -> None:
        path = self.directory / "run.json"
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            raw = json.loads(path.read_bytes())
        except ValueError:
            raise RunUnreadable(f"{path} is damaged: it holds no JSON. Try: osler runs") from None
        except OSError as error:
            if self._stamp is not None:
                return  # the run was deleted while we watch; what was read stays
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                raise RunNotFound(f"no run.json in {self.directory}; {describe_newest(self.directory)}. Try: osler runs") from None
            raise RunUnreadable(f"cannot read {path}: {error.strerror}") from None
        if not isinstance(raw, dict):
            raise RunUnreadable(f"{path} is damaged: it holds no JSON object. Try: osler runs")
        schema = raw.get("schema", SCHEMA)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise RunUnreadable(f"{self.directory} has schema {schema}, this osler reads up to {SCHEMA}. Try: pip install -U osler")
        self.run, self._stamp = raw, stamp

    def _read_end(self) -> None:
        if self.end is None and (raw := read_json(self.directory / "end.json")) is not None:
            self.end = End(raw.get("code"), raw.get("signal"), raw.get("seconds"), bool(raw.get("out_of_memory")))
