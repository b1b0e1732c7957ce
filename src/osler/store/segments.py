"""Fixed-row ``.npy`` segments of one series: ``steps-0000.npy``, ``steps-0001.npy``, ...

The rows are appended; the only bytes ever rewritten are the digits of the row count in the header, which has a fixed width
so that a reader in the middle of it still finds a valid header. It follows the rows, so ``np.load`` of a live or killed file gives complete rows (perhaps fewer than there are), while our own
reader goes by the file size. Every sealed segment has the same number of rows, so the place of a row in the whole series
is known even when earlier segments are gone.
"""

from __future__ import annotations

import io
import os
import re
from collections import deque
from pathlib import Path

import numpy as np

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
_NAME = re.compile(r"(?P<stream>[a-z_]+)(?:\.pyramid-(?P<level>\d+))?-(?P<number>\d{4,})\.npy")


def series_name(stream: str, level: int = 0) -> str:
    return stream if level == 0 else f"{stream}.pyramid-{level}"


def parse_name(file: str) -> tuple[str, int] | None:
    """``("steps.pyramid-1", 3)`` for ``steps.pyramid-1-0003.npy``; ``None`` for other files."""
    match = _NAME.fullmatch(file)
    return (series_name(match["stream"], int(match["level"] or 0)), int(match["number"])) if match else None


def header(dtype: np.dtype, rows: int) -> bytes:
    """A version 1.0 ``.npy`` header in which only the digits depend on ``rows``."""
    text = f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, 'fortran_order': False, 'shape': ({rows:20d},), }}"
    length = -(-(10 + len(text) + 1) // 64) * 64 - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode("ascii") + b"\n"


def parse_header(head: bytes) -> tuple[np.dtype, int] | None:
    """Row type and size of the header in bytes; ``None`` while the header is not complete.

    Raises:
        ValueError: this is no ``.npy`` file of rows.
    """
    if len(head) < 10:
        return None
    if head[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not an .npy file of version 1.0")
    size = 10 + int.from_bytes(head[8:10], "little")
    if len(head) < size:
        return None
    _, _, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(head[8:size]))
    if dtype.names is None or dtype.hasobject:
        raise ValueError("not an .npy file of rows")
    return dtype, size


def write_all(fd: int, data: bytes | bytearray) -> None:
    """``os.write`` until everything is written; raises ``OSError``."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view):]


class Segments:
    """Appends rows of one series, a new file every ``segment_rows`` rows. One thread only; raises ``OSError``."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype, segment_rows: int) -> None:
        self.directory, self.name, self.dtype, self.segment_rows = directory, name, dtype, segment_rows
        self.sealed: deque[tuple[Path, int]] = deque()
        """Path and size of the full segments that still exist, oldest first."""
        self.size = 0
        """Size of all segments that still exist."""
        self._fd = -1
        self._number = 0
        self._rows = 0
        self._counted = 0

    def append(self, data: bytes | bytearray) -> None:
        """Write whole rows given as bytes."""
        size, start = self.dtype.itemsize, 0
        while start < len(data):
            if self._fd < 0:
                self._open()
            stop = min(len(data), start + (self.segment_rows - self._rows) * size)
            write_all(self._fd, data[start:stop])
            self._rows += (stop - start) // size
            self.size += stop - start
            start = stop
            if self._rows == self.segment_rows:
                self._seal()

    def count(self) -> None:
        """Bring the row count of the open segment's header up to date."""
        if self._fd >= 0 and self._counted != self._rows:
            # Seek and write rather than pwrite, which Windows lacks; nobody else holds this descriptor.
            os.lseek(self._fd, 0, os.SEEK_SET)
            write_all(self._fd, header(self.dtype, self._rows))
            os.lseek(self._fd, 0, os.SEEK_END)
            self._counted = self._rows

    def drop_oldest(self) -> tuple[Path, int]:
        """Delete the oldest sealed segment; returns its path and size."""
        path, size = self.sealed.popleft()
        path.unlink(missing_ok=True)
        self.size -= size
        return path, size

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    @property
    def _path(self) -> Path:
        return self.directory / f"{self.name}-{self._number:04d}.npy"

    def _open(self) -> None:
        self._fd = os.open(self._path, _FLAGS, 0o666)
        self._rows = self._counted = 0
        head = header(self.dtype, 0)
        write_all(self._fd, head)
        self.size += len(head)

    def _seal(self) -> None:
        self.count()
        self.sealed.append((self._path, os.lseek(self._fd, 0, os.SEEK_CUR)))
        self.close()
        self._number += 1
