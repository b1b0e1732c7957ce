"""Values of device tensors, brought over without waiting.

The training thread only queues copies behind its own work: into a small ring on the device for what every step has (loss, gradient
norm), into pinned memory for samples. ``poll`` hands over what has arrived; nothing here waits for a device while training runs.
Tensors on the host are handed over at once, so one code serves both. CUDA and ROCm; values on other devices are not recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from osler.watch.readout import numbers, on_cpu

NAN = float("nan")
RING = 1024
FLUSH_VALUES, FLUSH_SECONDS = 64, 0.25
LIMIT = 1 << 18
"""Elements of one tensor that are copied at most."""
IN_FLIGHT = 256


class Late:
    """A number that is still on its way: NaN until ``ready``."""

    __slots__ = ("ready", "then", "value")

    def __init__(self, then: Callable[[float], None] | None = None) -> None:
        self.value, self.ready, self.then = NAN, False, then

    def arrive(self, value: float) -> None:
        self.value, self.ready = value, True
        if self.then is not None:
            self.then(value)


class Link:
    """How values leave a CUDA device."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor that will hold the values once the stream has come that far."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self, device: torch.device) -> Any:
        """Something with ``query()`` that tells whether everything queued so far is done, and ``synchronize()``."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def usable(self, tensor: torch.Tensor) -> bool:
        """Not inside the capture of a CUDA graph, where our copies would become part of it."""
        return tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class Ring:
    """Scalars of one device, one slot each, that cross together."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = torch.full((RING,), NAN, device=device)
        self.waiting: list[Late] = []
        self.since = perf_counter()


class Courier:
    """Everything that is on its way. Used on the training thread only."""

    def __init__(self, link: Link | None = None) -> None:
        self.link = link or Link()
        self.rings: dict[torch.device, Ring] = {}
        self.flights: deque[tuple[Any, list[torch.Tensor], Callable[..., None]]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.flights) or any(ring.waiting for ring in self.rings.values())

    def scalar(self, tensor: torch.Tensor, then: Callable[[float], None] | None = None) -> Late:
        """The value of a one-element device tensor, to come (and be given to ``then``); it stays NaN where it cannot be read."""
        late = Late(then)
        ring = self.rings.get(tensor.device)
        if not self.link.usable(tensor) or (ring is not None and len(ring.waiting) >= RING):
            late.ready = True
            return late
        if ring is None:
            ring = self.rings[tensor.device] = Ring(tensor.device)
        if not ring.waiting:
            ring.since = perf_counter()
        with torch.no_grad():
            ring.slots[len(ring.waiting)].copy_(tensor.detach().reshape(()), non_blocking=True)
        ring.waiting.append(late)
        return late

    def carry(self, tensors: Sequence[torch.Tensor], then: Callable[..., None]) -> bool:
        """Call ``then(*values)`` with the values on the host: at once if they are there, when they have arrived if not.

        Returns:
            whether they will be brought; false while too much is under way or where a device cannot be read.
        """
        if all(on_cpu(t) for t in tensors):
            then(*tensors)
            return True
        if len(self.flights) >= IN_FLIGHT or any(not on_cpu(t) and (t.numel() > LIMIT or not self.link.usable(t)) for t in tensors):
            return False
        with torch.no_grad():
            copies = [t if on_cpu(t) else self.link.copy(t.detach()) for t in tensors]
        self.flights.append((self.link.mark(next(t.device for t in tensors if not on_cpu(t))), copies, then))
        return True

    def poll(self) -> None:
        """Hand over what has arrived, in the order it was sent, and send what has waited long enough."""
        while self.flights and self.flights[0][0].query():
            _, copies, then = self.flights.popleft()
            then(*copies)
        if self.rings:
            now = perf_counter()
            for ring in self.rings.values():
                if len(ring.waiting) >= FLUSH_VALUES or (ring.waiting and now - ring.since > FLUSH_SECONDS):
                    self._send(ring)

    def _send(self, ring: Ring) -> None:
        waiting, ring.waiting = ring.waiting, []

        def deliver(values: torch.Tensor) -> None:
            for late, value in zip(waiting, numbers(values), strict=True):
                late.arrive(value)

        if not self.carry((ring.slots[: len(waiting)],), deliver):
            for late in waiting:
                late.ready = True

    def finish(self) -> None:
        """Training is over: wait for the rest."""
        for ring in self.rings.values():
            if ring.waiting:
                self._send(ring)
        while self.flights:
            event, copies, then = self.flights.popleft()
            event.synchronize()
            then(*copies)


class LateRows:
    """Rows of one stream, kept back in order while a value of theirs is on its way."""

    def __init__(self, write: Callable[[tuple[Any, ...]], None]) -> None:
        self.write = write
        self.rows: deque[tuple[Any, ...] | Callable[[], None]] = deque()

    def add(self, row: tuple[Any, ...], late: bool) -> None:
        if late or self.rows:
            self.rows.append(row)
        else:
            self.write(row)

    def add_block(self, write: Callable[[], None]) -> None:
        """Many rows at once, which ``write`` writes when their turn comes."""
        if self.rows:
            self.rows.append(write)
        else:
            write()

    def flush(self, everything: bool = False) -> None:
        while self.rows:
            row = self.rows[0]
            if isinstance(row, tuple):
                if not everything and not all(v.ready for v in row if isinstance(v, Late)):
                    return
                self.write(tuple(v.value if isinstance(v, Late) else v for v in row))
            else:
                row()
            self.rows.popleft()
