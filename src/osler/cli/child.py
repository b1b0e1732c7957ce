"""The watched process: started untouched, signalled as if we were not there, and how it ended.

It inherits standard streams, other open files (``<(...)``, job servers), ignored signals and the process group, so a
terminal's Ctrl-C and Ctrl-Z reach it as ever. Signals sent to the supervisor alone are passed on.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from osler.cli.witness import Witness

PASSED_ON = tuple(getattr(signal, name) for name in (
    "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCONT", "SIGTSTP", "SIGBREAK",
) if hasattr(signal, name))
POSIX = os.name == "posix"


@dataclass(frozen=True, slots=True)
class Ended:
    """``code`` as the process gave it, or the ``signal`` that killed it; ``status`` is what a shell calls ``$?``."""

    code: int | None
    signal: int | None
    seconds: float

    @property
    def status(self) -> int:
        return 128 + self.signal if self.signal is not None else self.code or 0

    @property
    def signal_name(self) -> str | None:
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


class Child:
    """Start with ``start``, then call ``wait`` until it says how the process ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._witness: Witness | None = None
        self._early: list[int] = []
        self._wake = -1
        self._old: dict[int, Any] = {}

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises ``OSError`` where the command cannot be started."""
        self._listen()
        try:
            self.process = subprocess.Popen(words, env=environment, close_fds=not POSIX)
        except OSError:
            self.let_go()
            raise
        self.started = time.monotonic()
        if POSIX:
            self._witness = Witness(self._old)
        for number in self._early:
            self.send(number)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else -1

    def send(self, number: int) -> None:
        """Signal the child; one that is gone does not mind."""
        if self.process is not None and self.process.returncode is None:
            try:
                os.kill(self.process.pid, number)
            except OSError:
                pass

    def wait(self, seconds: float) -> Ended | None:
        """Wait for the end, at most so long. A child that stops itself stops us too, so the shell sees the job stopped."""
        assert self.process is not None
        if not POSIX:
            try:
                return self._ended(self.process.wait(seconds))
            except subprocess.TimeoutExpired:
                return None
        ended = self._poll()
        if ended is None and seconds > 0:
            if select.select([self._wake], [], [], seconds)[0]:
                os.read(self._wake, 4096)
            ended = self._poll()
        return ended

    def _poll(self) -> Ended | None:
        assert self.process is not None
        try:
            pid, status = os.waitpid(self.process.pid, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:  # somebody set SIGCHLD to "ignore" for us: the status is lost
            return self._ended(0)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        return self._ended(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))

    def _ended(self, returncode: int) -> Ended:
        assert self.process is not None
        self.process.returncode = returncode
        seconds = time.monotonic() - self.started
        return Ended(None, -returncode, seconds) if returncode < 0 else Ended(returncode, None, seconds)

    def _listen(self) -> None:
        """Handlers, not "ignore": a handler is reset when the child's program starts, "ignore" would be inherited."""
        if POSIX:
            self._wake, write = os.pipe()
            os.set_blocking(self._wake, False)
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in PASSED_ON:
            current = signal.getsignal(number)
            if current != signal.SIG_IGN:  # nohup and the like: it stays ignored, by the child too
                self._old[number] = current
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.process is None:
            self._early.append(number)
        elif not (self._witness.saw(number) if self._witness is not None else number == signal.SIGINT):
            self.send(number)
        if number == getattr(signal, "SIGTSTP", None):
            os.kill(os.getpid(), signal.SIGSTOP)

    def let_go(self) -> None:
        """The child is over: signals mean us again."""
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old.clear()
        if self._witness is not None:
            self._witness.close()
            self._witness = None


def end_like(ended: Ended) -> int:
    """End this process the way the child ended; returns the exit code for where that is not possible.

    A shell that runs a loop stops at Ctrl-C only if the program *died* of SIGINT, so a mere 130 would not do.
    """
    if ended.signal is None or not POSIX:
        return ended.status
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child's core file is the one that matters
        if ended.signal not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(ended.signal, signal.SIG_DFL)
        os.kill(os.getpid(), ended.signal)
        time.sleep(0.2)
    except (OSError, ValueError):
        pass
    return ended.status
