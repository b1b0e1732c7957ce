"""When to compare the rows of training and validation: at the first validation forwards, while the user's frames are alive."""

from __future__ import annotations

import sys
from time import perf_counter, sleep
from typing import Any

import torch

from osler.watch.compiler import quiet
from osler.watch.observe import Observer
from osler.watch.session import Session
from osler.watch.trace import tensors_in

SEEN, HELD, JOBS, SECONDS = 4, 1 << 22, 2, 6.0
LAST_WAIT = 3.5
"""Seconds after its start that the end of the process waits for a comparison."""


class RowTables:
    """Holds the inputs of a few training steps until the comparison has begun."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.seen: list[tuple[Any, Any]] = []
        self.waiting: torch.Tensor | None = None
        self.sources: set[int] = set()
        self.held = 0
        self.done: set[int] = set()
        self.job: Any = None
        self.started = 0.0
        observer.on_training, observer.on_target, observer.on_judging = self.trained, self.target, self.judging
        session.finishers.insert(0, self.finish)

    def trained(self, args: Any, kwargs: Any) -> None:
        """A root was called with gradients, in a recorded step."""
        if self.observer.last_loader >= 0:
            self.sources.add(self.observer.last_loader)
        tensor = _first((args, kwargs))
        if tensor is None or len(self.seen) >= SEEN or self.held + tensor.numel() > HELD or tensor.requires_grad:
            return
        self.waiting = tensor.detach()

    def target(self, target: Any) -> None:
        """A criterion was called in a recorded step; with the last input it makes a pair."""
        if self.waiting is not None and isinstance(target, torch.Tensor):
            if len(target) == len(self.waiting) if target.dim() else False:
                self.seen.append((self.waiting, target.detach()))
                self.held += self.waiting.numel()
            self.waiting = None

    @quiet
    def judging(self, args: Any, kwargs: Any, whole: bool) -> None:
        """A root (``whole``) or part of one was called in a stretch without gradients. A part counts only where a loader of its own
        feeds it: a frozen network may be asked about a training batch."""
        last = self.observer.last_loader
        source = last if last not in self.sources else -1
        if not (whole or source >= 0) or len(self.done) >= JOBS or source in self.done or self.session.compiled:
            return
        if self.waiting is not None and len(self.seen) < SEEN:
            self.seen.append((self.waiting, None))
            self.waiting = None
        judged = _first((args, kwargs))
        if judged is None or (not self.seen and not self.sources):
            return
        self.done.add(source)
        self._begin(source, judged.detach(), sys._getframe(1))

    def _begin(self, source: int, judged: Any, frame: Any) -> None:
        from osler.watch.experiments.job import start_other
        from osler.watch.experiments.table import table
        alive = {i: loader for i, ref in self.observer.loaders if (loader := ref()) is not None}
        training = [alive[i].dataset for i in sorted(self.sources) if i in alive]
        judging = [alive[source].dataset] if source in alive else []
        job = start_other(lambda emit: table(training, judging, self.seen, judged, frame, lambda row: emit({**row, "loader": source})), SECONDS)
        if job is not None:
            self.job, self.started = job, perf_counter()
            self.training.backwards.jobs.append(job)
        if len(self.done) >= JOBS:
            self.seen, self.waiting = [], None

    @quiet
    def finish(self) -> None:
        """No validation was seen: what can be asked of the training rows alone (and of arrays at module level). After Ctrl-C nothing is begun: that
        takes time, and code run from a string would make Python forget that it was a signal."""
        if self.session.interrupted:
            return
        if not self.done and (self.seen or self.sources) and self.session.writer is not None and not self.session.compiled:
            if self.waiting is not None:
                self.seen.append((self.waiting, None))
            self.done.add(-1)
            self._begin(-1, None, None)
        self.seen, self.waiting = [], None
        while self.job is not None and self.job.poll() is None and perf_counter() - self.started < LAST_WAIT:
            sleep(0.01)


def _first(values: Any) -> torch.Tensor | None:
    """The first tensor of at least two rows; CPU only."""
    return next((t for t in tensors_in((values,), 3) if t.device.type == "cpu" and t.dim() >= 1 and t.shape[0] >= 2 and not t.is_sparse), None)

