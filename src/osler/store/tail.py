"""Files that grow while they are read: each call returns what is new since the last one. Torn ends wait for the next call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from osler.store.segments import parse_header


class RowTail:
    """New rows of one ``.npy`` segment, in the wanted row type.

    Attributes:
        rows: rows read so far.
        damaged: the file is no segment and is not looked at again.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, dtype
        self.rows = 0
        self.damaged = False
        self._format: tuple[np.dtype, int] | None = None

    def read(self) -> np.ndarray:
        """Complete rows appended since the last call. A file that vanished or cannot be read gives none."""
        none = np.empty(0, self.dtype)
        if self.damaged:
            return none
        try:
            with open(self.path, "rb", buffering=0) as file:
                if self._format is None:
                    self._format = parse_header(file.read(4096))
                    if self._format is None:
                        return none
                dtype, start = self._format
                file.seek(start + self.rows * dtype.itemsize)
                data = file.readall()
        except OSError:
            return none
        except (ValueError, SyntaxError):
            self.damaged = True
            return none
        n = len(data) // dtype.itemsize
        self.rows += n
        return adapt(np.frombuffer(data, dtype, n), self.dtype)


def adapt(rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rows of another schema: columns by name, what is absent counts as not measured (NaN, -1)."""
    if rows.dtype == dtype:
        return rows
    adapted = np.empty(len(rows), dtype)
    for name in dtype.names or ():
        if name in (rows.dtype.names or ()):
            adapted[name] = rows[name]
        else:
            adapted[name] = {"f": np.nan, "i": -1}.get(dtype[name].kind, 0)
    return adapted


class LineTail:
    """New objects of one JSONL file. ``damaged`` counts complete lines that are no JSON object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self._offset)
                data = file.readall()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        found = []
        for line in data[:whole].splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                found.append(row)
            elif line.strip():
                self.damaged += 1
        return found


class Growing:
    """One contiguous array that rows are appended to and dropped from in front.

    A view handed out stays as it was: rows are only written behind its end, and a larger array is a new one.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._rows = np.empty(0, dtype)
        self._start = self._stop = 0

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def view(self) -> np.ndarray:
        view = self._rows[self._start:self._stop]
        view.flags.writeable = False
        return view

    def append(self, rows: np.ndarray) -> None:
        if self._stop + len(rows) > len(self._rows):
            grown = np.empty(max(256, (len(self) + len(rows)) * 3 // 2), self._rows.dtype)
            grown[:len(self)] = self._rows[self._start:self._stop]
            self._rows, self._start, self._stop = grown, 0, len(self)
        self._rows[self._stop:self._stop + len(rows)] = rows
        self._stop += len(rows)

    def drop(self, n: int) -> None:
        self._start += min(n, len(self))
