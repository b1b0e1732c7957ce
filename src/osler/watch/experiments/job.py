"""Forks the training process, runs the experiments in the copy, and collects what it writes into a pipe.

The copy is a grandchild: its parent ends at once, so no ``os.wait`` of the user's meets a process that is not his.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from osler.watch.experiments.capture import Capture, obstacle, process_obstacle
from osler.watch.experiments.run import run
from osler.watch.experiments.sandbox import close_in

GRACE = 1.0
LOADED = 2.4
"""How much longer than planned a copy may take by the clock, where other processes want the processor too."""


class Job:
    """Experiments under way in a forked copy.

    Attributes:
        blocked: seconds that ``start`` kept the training waiting.
    """

    def __init__(self, pipe: int, seconds: float) -> None:
        self.blocked = 0.0
        self._pipe = pipe
        self._owner = os.getpid()
        self._seconds = seconds
        self._started = perf_counter()
        self._text = b""
        self._facts: list[dict[str, Any]] | None = None

    def poll(self) -> list[dict[str, Any]] | None:
        """The facts once the copy has ended (or its time is over), ``None`` before. Never blocks."""
        if self._facts is not None or os.getpid() != self._owner:
            return self._facts
        ended = self._read()
        if not ended and perf_counter() - self._started > self._seconds + GRACE:
            self._kill()
            ended = True
        if ended:
            os.close(self._pipe)
            self._reap()
            self._facts = self._parse(complete=True)
        return self._facts

    def cancel(self) -> None:
        """Ends the copy now; what it has found so far is what ``poll`` returns."""
        if self._facts is None and os.getpid() == self._owner:
            if not self._read():
                self._kill()
            os.close(self._pipe)
            self._reap()
            self._facts = self._parse(complete=False)

    def _read(self) -> bool:
        while True:
            try:
                part = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not part:
                return True
            self._text += part

    def _rows(self) -> Iterator[dict[str, Any]]:
        for line in self._text.split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row

    def _pid(self) -> int | None:
        return next((row["pid"] for row in self._rows() if isinstance(row.get("pid"), int)), None)

    def _kill(self) -> None:
        if (pid := self._pid()) is not None:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def _reap(self) -> None:
        """Orphans go to init; where the training itself is init (a container) or a sub-reaper, to us."""
        if (pid := self._pid()) is not None:
            try:
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass

    def _parse(self, complete: bool) -> list[dict[str, Any]]:
        facts, begun, ended = [], None, False
        for row in self._rows():
            if "begin" in row:
                begun = row["begin"]
            elif "end" in row:
                ended = True
            elif "name" in row:
                facts.append(row)
                begun = None if row["name"] == begun else begun
        if not ended and complete:
            facts.append({"name": begun or "experiments", "failed": f"the copy ended early or took more than {self._seconds:g} s", "at": None})
        return facts


def start(capture: Capture, seconds: float = 5.0) -> Job | None:
    """Starts all experiments on ``capture``; ``None`` where a fork is impossible or dear (``obstacle`` says why).

    Must be called on the main thread. The parent's random state, signals and warnings stay as they are.
    """
    return None if obstacle(capture) is not None else _begin(lambda emit: run(capture, emit, seconds), LOADED * seconds)


def start_other(body: Callable[[Callable[[dict[str, Any]], None]], None], seconds: float) -> Job | None:
    """Runs ``body(emit)`` in a forked copy: an experiment that needs no captured forward pass. ``None`` where a fork is impossible."""
    return None if process_obstacle() is not None else _begin(body, seconds)


def _begin(body: Callable[[Callable[[dict[str, Any]], None]], None], seconds: float) -> Job | None:
    begin = perf_counter()
    try:
        read, write = os.pipe()
    except OSError:
        return None
    try:
        with _undisturbed():
            _twice(body, read, write, seconds)
    except (OSError, RuntimeError):
        os.close(read)
        return None
    finally:
        os.close(write)
    os.set_blocking(read, False)
    job = Job(read, seconds)
    job.blocked = perf_counter() - begin
    return job


def _twice(body: Callable[[Callable[[dict[str, Any]], None]], None], read: int, write: int, seconds: float) -> None:
    owner = os.getpid()
    try:
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                os.close(read)
                _live(body, write, seconds)
            os._exit(0)
    finally:
        # Whatever happens in a copy, it must never return into the user's program.
        if os.getpid() != owner:
            os._exit(1)
    while True:
        try:
            os.waitpid(child, 0)
            return
        except OSError as problem:
            if problem.errno != errno.EINTR:
                return


def _live(body: Callable[[Callable[[dict[str, Any]], None]], None], write: int, seconds: float) -> None:
    pipe = close_in(write, seconds)

    def emit(row: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(row, default=str) + "\n").encode())

    emit({"pid": os.getpid()})
    body(emit)
    emit({"end": True})


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait (a KeyboardInterrupt must not surface in a copy), SIGCHLD of our own child reaches no handler of the
    user's, and nobody's warning about forks is shown. A filter put in place by hand, unlike ``catch_warnings``, does not make
    Python forget which warnings it has already shown."""
    handler = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    quiet = ("ignore", None, Warning, None, 0)
    tokenizers = "tokenizers" in sys.modules and "TOKENIZERS_PARALLELISM" not in os.environ
    try:
        warnings.filters.insert(0, quiet)  # type: ignore[attr-defined]
        if tokenizers:
            os.putenv("TOKENIZERS_PARALLELISM", "false")
        if callable(handler):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGCHLD, handler)
            if _zombie():
                os.kill(os.getpid(), signal.SIGCHLD)
        if tokenizers:
            os.unsetenv("TOKENIZERS_PARALLELISM")
        if quiet in warnings.filters:
            warnings.filters.remove(quiet)  # type: ignore[attr-defined]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _zombie() -> bool:
    """A child of the user's own ended meanwhile: its signal was swallowed and must be sent again."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (OSError, AttributeError):
        return False
