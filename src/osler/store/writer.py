"""What the training process calls to record. The calls append to buffers; a daemon thread owns the files.

No method raises, blocks on the disk (``flush`` and ``close`` wait for a bounded time) or takes a lock that a signal handler
or a forked child could find taken. After the first error of the disk the writer is inert and ``Writer.error`` says why.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from osler.core.facts import Fact
from osler.core.signals import STREAMS
from osler.store.codec import Codec, to_line
from osler.store.disk import MIB, Batch, Disk
from osler.store.files import write_json
from osler.store.process import follow_forks, leave_signals_alone

__all__ = ["Writer", "write_json"]

PENDING_BYTES = 16 * MIB
"""Rows of a stream that may wait for a disk that hangs, and lines and files likewise; more are lost and counted."""


class Writer:
    """Records one process into ``DIRECTORY/rank-0000``.

    Everything is accepted from the start and waits in memory; the folder appears after ``open``.

    Args:
        directory: the run directory; made when missing.
        rank: rank of this process.
        cap_bytes: size of the rank directory at which the oldest fine-grained segments are deleted.
        flush_seconds: how often the thread writes; a killed process loses no more than this.

    Attributes:
        error: why recording stopped, ``None`` while all is well.
        lost: calls that could not be recorded (malformed, or too much waiting for the disk).
    """

    def __init__(self, directory: Path, rank: int = 0, cap_bytes: int = 256 * MIB, flush_seconds: float = 0.25) -> None:
        self.error: str | None = None
        self.lost = 0
        self._where, self._rank, self._cap = Path(directory), rank, cap_bytes
        self._flush_seconds = min(flush_seconds, 0.5)
        self._pid = os.getpid()
        self._codecs = {name: Codec(stream) for name, stream in STREAMS.items()}
        self._slots: dict[str, tuple[Callable[..., bytes], bytearray]] = {
            name: (codec.pack, bytearray()) for name, codec in self._codecs.items()}
        self._events: list[tuple[str, int, Any]] = []
        self._events_bytes = 0
        self._sources: set[str] = set()
        self._noted: set[str] = set()
        self._open = self._closing = False
        self._disk: Disk | None = None
        self._drain_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # A lock as a bell: release() is atomic, so ringing it is safe in a signal handler; Event and Condition are not.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._tickets: list[threading.Lock] = []

    @property
    def directory(self) -> Path | None:
        """The rank directory, ``None`` until the thread has made it."""
        return self._disk.directory if self._disk is not None else None

    @property
    def active(self) -> bool:
        """Whether what is recorded will be written."""
        return bool(self._slots)

    def row(self, stream: str, values: Sequence[Any]) -> None:
        """Append one row, values in the order of the stream's columns. The hot path: well below a microsecond."""
        try:
            pack, pending = self._slots[stream]
            if len(pending) < PENDING_BYTES:
                pending += pack(*values)
            else:
                self._note("budget", f"the disk does not keep up: rows of {stream!r} were lost")
        except Exception:
            self._odd_row(stream, values)

    def rows(self, stream: str, array: np.ndarray) -> None:
        """Append a structured array of rows."""
        try:
            slot = self._slots.get(stream)
            if slot is None:
                self._unknown(stream)
            elif len(slot[1]) < PENDING_BYTES:
                pending = slot[1]
                pending += self._codecs[stream].encode(array)
            else:
                self._note("budget", f"the disk does not keep up: rows of {stream!r} were lost")
        except Exception as error:
            self._note("guard", f"rows of {stream!r} not recorded: {error}")

    def fact(self, fact: Fact) -> None:
        """Append a fact; it is encoded at once, so its data may change afterwards."""
        try:
            if self._slots:
                line = to_line(fact.to_json())
                self._push("fact", len(line), line)
        except Exception as error:
            self._note("guard", f"fact {getattr(fact, 'kind', '?')!r} not recorded: {error}")

    def trace(self, trace: dict[str, Any]) -> None:
        """Hand over a recorded trace, see ``osler.core.trace``; the dict must not change afterwards."""
        try:
            self._push("trace", 200 * len(trace["ops"]), trace)
        except Exception as error:
            self._note("guard", f"trace not recorded: {error!r}")

    def source(self, path: str, text: str) -> None:
        """Keep the text of a user's file under the path that locations use; the second call for a path is ignored."""
        try:
            if path not in self._sources:
                self._sources.add(path)
                self._push("source", len(text), (path, text))
        except Exception as error:
            self._note("guard", f"source not recorded: {error!r}")

    def open(self) -> None:
        """Begin to write. Only starts the thread: the first contact with the disk happens there."""
        if self._pid != os.getpid():
            self.become_inert()
        if self._open or not self._slots:
            return
        self._open = True
        atexit.register(self.close)
        follow_forks(self)
        self._start()

    def flush(self, timeout: float = 1.0) -> bool:
        """Wait until everything recorded so far is written; returns whether it is."""
        if not self._mine or self._thread is threading.current_thread():
            return False
        if self._thread is None or not self._thread.is_alive():
            return self._drain(timeout)
        ticket = threading.Lock()
        ticket.acquire()
        self._tickets.append(ticket)
        self._ring()
        return ticket.acquire(timeout=timeout) and self.error is None

    def close(self, timeout: float = 2.0) -> None:
        """Write what is pending and stop; waits at most about ``timeout``. What is recorded later is ignored.

        Registered with ``atexit`` by ``open``: exit handlers that still record must be registered after it.
        """
        if not self._mine or self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout
        try:
            self._pause(timeout)
            # Also for what came meanwhile, or when no thread could start (in an exit handler).
            if self._drain(max(0.0, deadline - time.monotonic())) and self._disk is not None:
                self._disk.close()
        except BaseException as error:  # also a second Ctrl-C during the wait: the process is ending anyway
            self.error = self.error or f"closing: {error!r}"
        self._slots = {}

    @property
    def _mine(self) -> bool:
        """Opened, without error, and in the process that made it."""
        return self._open and bool(self._slots) and self._pid == os.getpid()

    def _push(self, kind: str, size: int, value: Any) -> None:
        if not self._slots:
            return
        if self._events_bytes + size > PENDING_BYTES and self._events:
            self.lost += 1
            return
        self._events_bytes += size
        self._events.append((kind, size, value))

    def _odd_row(self, stream: str, values: Sequence[Any]) -> None:
        slot = self._slots.get(stream)
        if slot is None:
            self._unknown(stream)
            return
        try:
            pending = slot[1]
            pending += self._codecs[stream].coerce(values)
        except Exception as error:
            self._note("guard", f"row of {stream!r} not recorded: {error}")

    def _unknown(self, stream: str) -> None:
        if self._slots:
            self._note("guard", f"no stream {stream!r} is declared in osler.core.signals")

    def _note(self, what: str, text: str) -> None:
        """Count a loss, and say each sort of it once in the facts."""
        self.lost += 1
        if text not in self._noted and len(self._noted) < 20:
            self._noted.add(text)
            step, t = (self._disk.step, self._disk.t) if self._disk is not None else (0, 0.0)
            line = to_line(Fact("self", step, t, data={"what": what, "text": text}).to_json())
            self._push("fact", len(line), line)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="osler-writer", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down: close() writes
            self._thread = None

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it rings already

    def _pause(self, timeout: float) -> None:
        """Let the thread write what is pending and end. One that hangs ends by itself when the disk answers."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._ring()
            thread.join(timeout)

    def _work(self) -> None:
        leave_signals_alone()
        me = threading.current_thread()
        while self._slots:
            tickets = self._take_tickets()
            self._drain(0.5)
            for ticket in tickets:
                ticket.release()
            if self._thread is not me:
                return
            self._bell.acquire(timeout=self._flush_seconds)
        for ticket in self._take_tickets():
            ticket.release()

    def _take_tickets(self) -> list[threading.Lock]:
        taken = self._tickets[:]
        del self._tickets[:len(taken)]
        return taken

    def _take(self) -> Batch:
        """Everything pending, rows before facts (see ``Disk.write``). A slice and a deletion lose no concurrent append."""
        rows: dict[str, bytes | bytearray] = {}
        for name, (_, pending) in self._slots.items():
            taken = pending[:]
            if taken:
                del pending[:len(taken)]
                rows[name] = taken
        events = self._events[:]
        del self._events[:len(events)]
        self._events_bytes -= sum(size for _, size, _ in events)
        of = {kind: [value for k, _, value in events if k == kind] for kind in ("fact", "trace", "source")}
        return Batch(rows, of["fact"], of["trace"], of["source"])

    def _drain(self, timeout: float) -> bool:
        if not self._drain_lock.acquire(timeout=timeout):
            return False
        try:
            if self._slots and self._pid == os.getpid():
                if self._disk is None:
                    self._disk = Disk(self._where, self._rank, self._cap, max(4096, min(4 * MIB, self._cap // 32)))
                batch = self._take()
                if batch:
                    self._disk.write(batch)
            return self.error is None
        except Exception as error:
            self._fail(error)
            return False
        finally:
            self._drain_lock.release()

    def _fail(self, error: Exception) -> None:
        step = self._disk.step if self._disk is not None else 0
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        self.error = f"recording into {self.directory or self._where} stopped after step {step}: {why}"
        self.become_inert()
        try:
            if self._disk is not None:
                self._disk.close()
        except OSError:
            pass

    def before_fork(self) -> None:
        if self._mine:
            self._pause(0.2)

    def after_fork_in_parent(self) -> None:
        if self._mine and not self._closing:
            self._start()

    def become_inert(self) -> None:
        self._slots, self._events = {}, []
