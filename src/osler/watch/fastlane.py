"""The fast lane: between watched cycles of very short steps, wrappers are swapped for ones that do next to nothing.

A Python frame costs several microseconds where it runs cold between kernels, so on a step of 200 µs the taps' early exits
alone would be too dear. In the fast lane steps are counted, and a loss on the CPU is still checked for finiteness before its
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from osler.watch.session import Session


class FastLane:
    """Swaps registered functions and remembers until which step. ``single``: ``id`` of the only optimizer
    alive, whose steps need no telling apart; 0 where there are several."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.until = 0
        self.began = 0
        self.depth = 0
        self.single = 0
        self.counts: dict[int, int] = {}
        self.losses: list[float] = []
        self.entered: Callable[[], None] = lambda: None
        self.left: Callable[[], None] = lambda: None
        self._swaps: list[tuple[Any, str, Any, Any]] = []
        session.leave_fast = self.leave

    def register(self, namespace: Any, name: str, full: Any, quick: Any) -> None:
        """``namespace.name`` is ``full`` while watching and ``quick`` in the fast lane (unless a user replaced it)."""
        self._swaps.append((namespace, name, full, quick))

    def counted(self, optimizer: Any) -> int:
        """Steps of an optimizer in the lane so far, which its loop does not know yet."""
        return self.session.step - self.began if self.single else self.counts.get(id(optimizer), 0)

    def enter(self, until: int) -> None:
        self.until, self.began, self.depth = until, self.session.step, 0
        self.counts.clear()
        self.losses.clear()
        self.session.fast = True
        for namespace, name, full, quick in self._swaps:
            if getattr(namespace, name) is full:
                setattr(namespace, name, quick)
        self.entered()

    def leave(self) -> None:
        """Full wrappers again. Also called in a forked child, where nothing is booked since there is no writer."""
        if not self.session.fast:
            return
        self.session.fast = False
        for namespace, name, full, quick in self._swaps:
            if getattr(namespace, name) is quick:
                setattr(namespace, name, full)
        self.left()
