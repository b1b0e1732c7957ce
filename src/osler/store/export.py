"""A run as tables for other tools: one table per stream plus the facts, all ranks together."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from osler.core.errors import MissingExtra, UsageError
from osler.core.signals import STREAMS
from osler.core.window import Window
from osler.store.reader import RunReader

FORMATS = ("parquet", "csv", "sqlite")
_FACTS = (("rank", "i"), ("attempt", "i"), ("kind", "s"), ("step", "i"), ("t", "f"), ("file", "s"), ("line", "i"),
          ("function", "s"), ("lib", "s"), ("data", "s"))
_CHUNK = 65536


def export(run_dir: Path, fmt: str, out: Path) -> list[Path]:
    """Write a run as tables; returns the files written.

    ``parquet`` and ``csv`` write a folder with one file a table, ``sqlite`` one file (replaced when it exists). Every table
    begins with ``rank`` and ``attempt``. SQLite has no unsigned 64-bit integers: ``rows.hash`` keeps its bits and may be
    negative there; NaN becomes NULL.

    Raises:
        UsageError: an unknown format, or the place cannot be written.
        MissingExtra: Parquet without pyarrow.
        RunNotFound, RunUnreadable: there is no such run.
    """
    if fmt not in FORMATS:
        raise UsageError(f"no format {fmt!r}; known: {', '.join(FORMATS)}")
    reader = RunReader(run_dir)
    windows = [(rank, attempt, reader.window(rank, attempt))
               for rank in reader.ranks() for attempt in range(1, reader.attempts(rank) + 1)]
    try:
        return {"parquet": _parquet, "csv": _csv, "sqlite": _sqlite}[fmt](windows, Path(out))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None


_Windows = list[tuple[int, int, Window]]


def _tables(windows: _Windows) -> Iterator[tuple[str, np.ndarray]]:
    """Name and rows of the stream tables, with rank and attempt in front."""
    for name, stream in STREAMS.items():
        dtype = np.dtype([("rank", "<i4"), ("attempt", "<i4"), *[(c.name, c.dtype) for c in stream.columns]])
        pieces = [np.empty(0, dtype)]
        for rank, attempt, window in windows:
            rows = window.stream(name)
            piece = np.empty(len(rows), dtype)
            piece["rank"], piece["attempt"] = rank, attempt
            for column in stream.columns:
                piece[column.name] = rows[column.name]
            pieces.append(piece)
        yield name, np.concatenate(pieces)


def _facts(windows: _Windows) -> list[tuple[Any, ...]]:
    return [(rank, attempt, f.kind, f.step, f.t, f.at.file if f.at else None, f.at.line if f.at else None,
             f.at.function if f.at else None, f.lib, json.dumps(f.data))
            for rank, attempt, window in windows for f in window.all_facts]


def _parquet(windows: _Windows, out: Path) -> list[Path]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("pyarrow", "export") from None
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in _tables(windows):
        written.append(out / f"{name}.parquet")
        columns = {c: np.ascontiguousarray(rows[c]) for c in rows.dtype.names or ()}
        pq.write_table(pa.table(columns), written[-1])
    types = {"i": pa.int64(), "f": pa.float64(), "s": pa.string()}
    facts = list(zip(*_facts(windows), strict=True)) or [()] * len(_FACTS)
    table = pa.table({name: pa.array(values, types[kind]) for (name, kind), values in zip(_FACTS, facts, strict=True)})
    written.append(out / "facts.parquet")
    pq.write_table(table, written[-1])
    return written


def _csv(windows: _Windows, out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    written = []

    def write(name: str, names: tuple[str, ...], rows: Iterator[Any]) -> None:
        written.append(out / f"{name}.csv")
        with open(written[-1], "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(rows)

    for name, rows in _tables(windows):
        write(name, rows.dtype.names or (), _chunks(rows))
    write("facts", tuple(n for n, _ in _FACTS), iter(_facts(windows)))
    return written


def _sqlite(windows: _Windows, out: Path) -> list[Path]:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as database, database:
            for name, rows in _tables(windows):
                signed = rows.astype([(n, "<i8" if rows.dtype[n] == np.uint64 else rows.dtype[n]) for n in rows.dtype.names or ()])
                kinds = {n: "REAL" if signed.dtype[n].kind == "f" else "INTEGER" for n in signed.dtype.names or ()}
                _insert(database, name, kinds, _chunks(signed))
            words = {"i": "INTEGER", "f": "REAL", "s": "TEXT"}
            _insert(database, "facts", {n: words[k] for n, k in _FACTS}, iter(_facts(windows)))
        os.replace(temporary, out)
    except sqlite3.Error as error:
        raise UsageError(f"cannot write {out}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return [out]


def _insert(database: sqlite3.Connection, table: str, kinds: dict[str, str], rows: Iterator[Any]) -> None:
    database.execute(f'CREATE TABLE "{table}" ({", ".join(f"{chr(34)}{n}{chr(34)} {k}" for n, k in kinds.items())})')
    database.executemany(f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(kinds))})', rows)


def _chunks(rows: np.ndarray) -> Iterator[Any]:
    """Rows as tuples of Python numbers, without all of them in memory at once."""
    for start in range(0, len(rows), _CHUNK):
        yield from rows[start:start + _CHUNK].tolist()
