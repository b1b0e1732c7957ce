"""State of one watched process: step counter, clock, budget, writer, registry. Taps hold a reference to it.

Nothing is opened until training is seen (first optimizer construction, backward or exhausted DataLoader), so launchers,
DataLoader workers and helper processes stay silent. After a fork the child starts afresh and opens a store only if it trains.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from osler.core.facts import Fact, Location
from osler.store.writer import Writer
from osler.watch.budget import Budget
from osler.watch.guard import Guard
from osler.watch.registry import Registry

if TYPE_CHECKING:
    from osler.watch.courier import Courier

PENDING_LIMIT = 2000


class Session:
    """One per process. See the module docstring."""

    def __init__(self, directory: Path, budget: float = 0.02, guard_steps: bool = False) -> None:
        self.directory = directory
        self.guard_steps = guard_steps
        self.budget_share = budget
        self.guard = Guard(self.about_self)
        self.registry = Registry()
        self.compiled = False
        self.half = False
        self.finishers: list[Callable[[], None]] = []
        self.adopt: Callable[[Any], None] = lambda _: None
        self.on_compile: list[Callable[[], None]] = []
        self.leave_fast: Callable[[], None] = lambda: None
        self.looks: list[Callable[[], None]] = []
        self.courier: Courier
        self.writer: Writer | None = None
        self.fast = False
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.writer = None
        self.leave_fast()
        self.pending: list[Fact] = []
        self.sources: set[str] = set()
        self.t0 = perf_counter()
        self.budget = Budget(self.budget_share)
        self.step = 0
        self.own = 0.0
        self.in_step = False
        self.fast = False
        self.finished = False
        self.interrupted = False
        self.rank = 0
        self.main_thread = threading.get_ident()
        self.in_child = getattr(self, "attached_pid", os.getpid()) != os.getpid()
        self.attached_pid = getattr(self, "attached_pid", os.getpid())

    def now(self) -> float:
        return perf_counter() - self.t0

    def look(self) -> None:
        """A spaced step ended, the user's loop is on the stack: everyone who wants to looks around."""
        for look in self.looks if self.guard.armed("look") else ():
            try:
                look()
            except Exception:
                self.guard.failed("look")

    def about_self(self, what: str, text: str) -> None:
        self.fact("self", what=what, text=text)

    def fact(self, kind: str, at: Location | None = None, lib: str | None = None, /, **data: Any) -> None:
        fact = Fact(kind, self.step, self.now(), at, data, lib)
        if self.writer is not None:
            self.writer.fact(fact)
            self._keep_source(at)
        elif len(self.pending) < PENDING_LIMIT:
            self.pending.append(fact)

    def row(self, stream: str, values: tuple[Any, ...]) -> None:
        if self.writer is not None:
            self.writer.row(stream, values)

    def _keep_source(self, at: Location | None) -> None:
        if at is None or at.file in self.sources or self.writer is None or len(self.sources) > 200:
            return
        self.sources.add(at.file)
        try:
            path = Path(at.file)
            if path.is_file() and path.stat().st_size < 2_000_000:
                self.writer.source(at.file, path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            pass

    def keep_source(self, file: str) -> None:
        self._keep_source(Location(file, 1))

    def open(self) -> None:
        """Open the store: training has begun in this process."""
        if self.writer is not None or self._is_loader_worker():
            return
        self.rank = self._rank()
        writer = Writer(self.directory, rank=self.rank)
        writer.open()
        self.writer = writer
        atexit.unregister(self.finish)
        atexit.register(self.finish)  # after the writer's own exit handler was registered: handlers run last in, first out
        workers = sys.modules.get("multiprocessing.util")
        if workers is not None and self.in_child:  # a forked worker ends without exit handlers
            workers.Finalize(None, self.finish, exitpriority=10)
        main = sys.modules.get("__main__")
        path = getattr(main, "__file__", None)
        torch = sys.modules.get("torch")
        writer.fact(Fact("attached", self.step, self.now(), None, {
            "torch": str(getattr(torch, "__version__", "?")), "python": sys.version.split()[0], "pid": os.getpid(),
            "main": path, "argv": sys.argv[:50], "threads": torch.get_num_threads() if torch else None,
            "forked": self.in_child}))
        if path:
            from osler.watch.where import shorten
            self.keep_source(shorten(path))
        for fact in self.pending:
            writer.fact(fact)
            self._keep_source(fact.at)
        self.pending = []

    @staticmethod
    def _is_loader_worker() -> bool:
        data = sys.modules.get("torch.utils.data")
        return data is not None and data.get_worker_info() is not None

    @staticmethod
    def _rank() -> int:
        distributed = sys.modules.get("torch.distributed")
        try:
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                return int(distributed.get_rank())
            return int(os.environ.get("RANK", "0"))
        except Exception:
            return 0

    def finish(self) -> None:
        """Python ends in order: let every tap say its last word, then flush."""
        if self.finished or (self.writer is None and not self.pending):
            return
        self.finished = True
        for finisher in self.finishers:
            try:
                finisher()
            except Exception:
                self.guard.failed("finish")
        if self.writer is not None:
            self.fact("exit", steps=self.step, clean=True)
            self.writer.close()
            self.writer = None

    def again(self, directory: Path) -> None:
        """A new watch in a process whose last one was closed (a notebook)."""
        self.directory = directory
        step = self.step
        self._reset()
        self.step = step
