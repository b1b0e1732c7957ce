"""Tells a signal sent to the supervisor alone from one sent to its whole process group.

Ctrl-C, ``timeout``, a batch scheduler: they signal the group, so the child has the signal already, and passing it on would
run its handler twice. ``kill PID``, ``docker stop``, an IDE's stop button: they signal the supervisor alone, and it must be
passed on. No process can see that difference for itself; a second, idle process of the same group can.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

PATIENCE = 0.1
"""Seconds to wait for the witness. Later than that (a machine that stands still), the signal is passed on."""
BIRTH = 2.0
"""The same while the witness is still starting. Signals are blocked in it until it can tell of them."""

CODE = """
import os, signal
def tell(number, frame):
    os.write(1, bytes([number]))
for number in {numbers}:
    signal.signal(number, tell)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {numbers})
os.write(1, bytes([0]))
while os.read(0, 1):
    pass
"""


class Witness:
    """An idle Python in our process group; it ends with us, since it reads from a pipe that only we hold."""

    def __init__(self, signals: Iterable[int]) -> None:
        self._seen: Counter[int] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        numbers = [int(s) for s in signals]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", CODE.format(numbers=numbers)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, cwd=os.sep)
        except OSError:
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def saw(self, number: int) -> bool:
        """Whether the group got this signal too; each sighting counts once."""
        process = self._process
        if process is None or process.stdout is None:
            return self.guess(number)
        while not self._seen[number]:
            if not select.select([process.stdout], [], [], PATIENCE if self._seen[0] else BIRTH)[0]:
                return False
            told = os.read(process.stdout.fileno(), 64)
            if not told:  # it is gone
                self._process = None
                return self.guess(number)
            self._seen.update(told)
        self._seen[number] -= 1
        return True

    @staticmethod
    def guess(number: int) -> bool:
        return number == signal.SIGINT and os.isatty(2)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()
