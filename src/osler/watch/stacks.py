"""Where the wall time of the training thread goes, by line: a thread of ours looks at its stack now and then.

Nothing is added to the training thread itself. The time between two looks grows with the run (a hundred a second at first, a
constant number per doubling later), so the cost fades. The thread is ended before every fork and begun again after it.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from osler.watch.session import Session
from osler.watch.where import is_user, shorten

PERIOD = 0.01
LOOKS = 400
"""After LOOKS * PERIOD seconds the period is the time so far divided by LOOKS."""
LONGEST = 0.25
SHARE = 0.004
"""Of the time, that the looks themselves may take."""
DEPTH = 90
FRAMES = 5
MAX_ROWS = 600
WRITTEN = 60
USER, LOADER, BACKWARD, STEP, FORWARD, OWN, LIBRARY = range(7)
KINDS = {LOADER: "loader", BACKWARD: "backward", STEP: "step", FORWARD: "forward", OWN: "osler"}
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
Key = tuple[tuple[tuple[CodeType, int], ...], int, CodeType | None, CodeType | None]

_sorts: dict[CodeType, int] = {}


def sort(code: CodeType) -> int:
    """What a frame of this code stands for."""
    known = _sorts.get(code)
    if known is None:
        name, file = code.co_name, code.co_filename.replace(os.sep, "/")
        if is_user(code):
            known = USER
        elif file.startswith((_OWN.replace(os.sep, "/"), "<osler")):
            known = OWN if not file.startswith("<osler") else LIBRARY
        elif file.endswith("torch/utils/data/dataloader.py") and name in ("__next__", "_next_data", "__iter__"):
            known = LOADER
        elif file.endswith("torch/autograd/__init__.py") and name == "backward":
            known = BACKWARD
        elif "torch/optim/" in file and name in ("step", "wrapper"):
            known = STEP
        elif file.endswith("torch/nn/modules/module.py") and name == "_call_impl":
            known = FORWARD
        else:
            known = LIBRARY
        _sorts[code] = known
    return known


class Stacks:
    """Seconds by stack: the innermost user lines, what part of training they are in, and the library code below them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rows: dict[Key, list[float]] = {}
        self.seconds = 0.0
        self.cpu = 0.0
        self.samples = 0
        self.spent = 0.0
        self.thread = 0
        self.began = 0.0
        self.told = 0.0
        self.first_step = 0
        self._ready = -1
        self._stop: Any = None
        self._done: Any = None
        self._wanted = False
        os.register_at_fork(before=self._pause, after_in_parent=self._resume, after_in_child=self._forget)
        session.finishers.insert(0, self.finish)  # before others wait for something at the end

    def start(self) -> None:
        """Begin to look at the thread that calls this (once)."""
        if self._wanted or self.session.finished:
            return
        self._wanted = True
        self.thread, self.began, self.first_step = threading.get_ident(), perf_counter(), self.session.step
        try:
            self._ready = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._ready = -1
        self._resume()

    def finish(self) -> None:
        self._pause()
        self.tell()
        self._forget()

    def _pause(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.release()
            self._done.acquire(True, 0.5)

    def _resume(self) -> None:
        if not self._wanted or self._stop is not None:
            return
        stop, done = _thread.allocate_lock(), _thread.allocate_lock()
        stop.acquire()
        done.acquire()
        self._stop, self._done = stop, done
        try:
            _thread.start_new_thread(self._run, (stop, done))
        except RuntimeError:
            self._stop, self._wanted = None, False

    def _forget(self) -> None:
        self._stop, self._wanted = None, False
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1
        self.rows, self.seconds, self.cpu, self.samples, self.told = {}, 0.0, 0.0, 0, 0.0

    def _run(self, stop: Any, done: Any) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            clock = time.pthread_getcpuclockid(self.thread)
            last, worked = perf_counter(), time.clock_gettime(clock) + self._queued()
            while not stop.acquire(True, self._period(last)):
                now, works = perf_counter(), time.clock_gettime(clock) + self._queued()
                frame = sys._current_frames().get(self.thread)
                if frame is None:
                    break
                self._look(frame, now - last, works - worked)
                del frame
                last, worked = now, works
                self.spent += perf_counter() - now
        except Exception:
            self.session.guard.failed("stacks")
        finally:
            done.release()

    def _queued(self) -> float:
        """Seconds that the thread was ready to run but had no processor: a crowded machine is no slow disk. Linux; 0 elsewhere."""
        if self._ready < 0:
            return 0.0
        try:
            return int(os.pread(self._ready, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _period(self, now: float) -> float:
        cost = self.spent / self.samples / SHARE if self.samples else 0.0
        return min(max(PERIOD, (now - self.began) / LOOKS, cost), LONGEST)

    def _look(self, frame: FrameType | None, wall: float, cpu: float) -> None:
        user: list[tuple[CodeType, int]] = []
        kind = LIBRARY
        leaf: CodeType | None = None
        via: CodeType | None = None
        for _ in range(DEPTH):
            if frame is None:
                break
            code = frame.f_code
            what = sort(code)
            if what == USER:
                user.append((code, frame.f_lineno))
            elif what == OWN:
                kind = OWN if not user and kind == LIBRARY else kind
            else:
                if not user:
                    leaf = leaf or code
                    via = code
                if what == LOADER or (what != LIBRARY and kind not in (LOADER, OWN)):
                    kind = what
            frame = frame.f_back
        key = ((*user[:FRAMES],) if len(user) <= FRAMES else (*user[: FRAMES - 1], user[-1]), kind, leaf, via)
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) >= MAX_ROWS:
                key = (key[0][:1], kind, None, None)
            row = self.rows.setdefault(key, [0.0, 0.0, 0.0])
        row[0] += wall
        row[1] += cpu
        row[2] += 1
        self.seconds += wall
        self.cpu += cpu
        self.samples += 1

    def tell(self) -> None:
        """Write what is known; called on the training thread."""
        session = self.session
        if session.writer is None or self.samples < 10 or self.seconds < 1.5 * self.told:
            return
        self.told = self.seconds
        known = dict(self.rows)  # the other thread may add rows meanwhile
        rows = sorted(known.items(), key=lambda item: -item[1][0])[:WRITTEN]
        session.fact("time", None, seconds=round(self.seconds, 4), cpu=round(self.cpu, 4), samples=self.samples, own=round(self.spent, 5),
                     steps=session.step - self.first_step,
                     rows=[{"stack": [[shorten(c.co_filename), line, c.co_name] for c, line in key[0]], "kind": KINDS.get(key[1]),
                            "leaf": name(key[2]), "via": name(key[3]), "seconds": round(value[0], 4), "cpu": round(value[1], 4), "samples": int(value[2])}
                           for key, value in rows])


def name(code: CodeType | None) -> str | None:
    """``json/decoder.py:raw_decode``: the last two parts of the file and the function."""
    return "/".join(code.co_filename.replace(os.sep, "/").split("/")[-2:]) + ":" + code.co_name if code is not None else None
