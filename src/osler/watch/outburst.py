"""A jump of the loss is looked at while its batch is still there: which row of the batch stands out, in inputs or targets.

Only in watched cycles; the loss is known there anyway. The batch is the one that a DataLoader served last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from osler.watch.observe import Observer
from osler.watch.readout import on_cpu, scalar
from osler.watch.session import Session
from osler.watch.where import user_line

TIMES = 5.0
MOST = 24
CAP = 1 << 22


class Outbursts:
    """Writes ``spike`` facts, at most ``MOST`` of them."""

    def __init__(self, session: Session, observer: Observer) -> None:
        self.session, self.observer = session, observer
        self.count = 0

    def seen(self, value: float, recent: Iterable[float]) -> bool:
        """Whether ``value`` stands out from the losses before it; if so, the batch is looked at."""
        before = [v for v in recent if math.isfinite(v)]
        if len(before) < 6 or self.count >= MOST or not value > TIMES * max(before) > 0:
            return False
        self.count += 1
        usual = sorted(before)[len(before) // 2]
        row: dict[str, float | int | None] = {"loss": value, "usual": usual}
        tensors = [t for ref in self.observer.last_batch if (t := ref()) is not None and on_cpu(t) and t.dim() >= 1 and t.shape[0] >= 4 and t.numel() <= CAP]
        for tensor, name in ((next((t for t in tensors if t.is_floating_point()), None), "row"), (tensors[-1] if len(tensors) > 1 else None, "target")):
            if tensor is not None and tensor.is_floating_point():
                with torch.no_grad():
                    size = tensor.detach().reshape(tensor.shape[0], -1).abs().amax(1).float()
                    middle, largest = scalar(size.median()), scalar(size.max())
                    row[f"{name}_ratio"] = largest / middle if middle > 0 and math.isfinite(largest) else None
                    if name == "row":
                        row["row"], row["largest"] = int(scalar(size.argmax())), largest
        self.session.fact("spike", user_line(), loader=self.observer.last_loader, **row)
        return True
