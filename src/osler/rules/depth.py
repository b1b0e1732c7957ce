"""Gradients along the depth of the network: root-mean-square gradient per weight, one row per sampled step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.curve import matrices, modules, parameters
from osler.rules.script import place


@dataclass(frozen=True, slots=True)
class Profile:
    """``rms`` [samples, layers] is NaN where a layer was not sampled; layers are in order of registration."""

    steps: npt.NDArray[np.int64]
    uids: tuple[int, ...]
    rms: npt.NDArray[np.float64]

    def ends(self, rms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Median of the first third of the layers over that of the last third, per sample (NaN where an end is missing)."""
        third = max(1, len(self.uids) // 3)
        rows = [r for r in rms if np.isfinite(r[:third]).any() and np.isfinite(r[-third:]).any()]
        pairs = [(float(np.nanmedian(r[:third])), float(np.nanmedian(r[-third:]))) for r in rows]
        found = np.array([a / b for a, b in pairs if b > 0])
        return found if len(found) else np.array([np.nan])


def profile(window: Window) -> Profile | None:
    """Of the root with the most weight matrices; matrices that never got a gradient are left out."""
    rows, known = window.layers, parameters(window)
    uids = matrices(window)
    rows = rows[np.isfinite(rows["grad_norm"]) & (rows["grad_norm"] > 0) & np.isin(rows["param"], uids)]
    if not len(rows):
        return None
    uids = [u for u in uids if (rows["param"] == u).any()]
    size = {u: float(np.prod([int(n) for n in known[u].get("shape") or (1,)])) for u in uids}
    steps = np.unique(rows["step"])
    rms = np.full((len(steps), len(uids)), np.nan)
    column = {u: i for i, u in enumerate(uids)}
    for row in rows:
        rms[np.searchsorted(steps, row["step"]), column[int(row["param"])]] = float(row["grad_norm"]) / size[int(row["param"])] ** 0.5
    return Profile(steps.astype(np.int64), tuple(uids), rms)


def growth(window: Window, off: float | None, start: float = 10.0, least: int = 8, factor: float = 100.0) -> tuple[float, int, Location | None] | None:
    """How far the outputs of stacked layers grow with depth at the first samples, where the first loss already lay ``start`` times above that of a
    guess (``off``): last over first, number of layers, where one of them is made."""
    rows, known = window.stream("activations"), modules(window)
    if off is None or off < start or not len(rows):
        return None
    rows = rows[(rows["step"] == rows["step"].min()) & np.isfinite(rows["std"]) & (rows["std"] > 0)]
    rows = rows[[str(known.get(int(m), {}).get("class", "")).startswith(("Linear", "Conv")) for m in rows["module"]]]
    rows = rows[np.argsort(rows["module"])]
    if len(rows) < least or rows["step"][0] > 2:
        return None
    size = np.log(rows["std"].astype(float))
    place_in_order = np.argsort(np.argsort(size))
    along = float(np.corrcoef(np.arange(len(size)), place_in_order)[0, 1])
    third = max(2, len(size) // 3)
    ratio = float(np.exp(np.median(size[-third:]) - np.median(size[:third])))
    if along < 0.9 or ratio < factor:
        return None
    return ratio, len(rows), place(known.get(int(rows["module"][len(rows) // 2]), {}).get("at"))


REPEATS = ("linear", "matmul", "mm", "addmm", "rnn_tanh_cell", "rnn_relu_cell")


def through_time(window: Window) -> dict[int, int]:
    """Square weights that one pass applies again and again: how often, by uid. The gates of LSTM and GRU are no square weights."""
    square = {u for u, p in parameters(window).items() if len(p.get("shape") or ()) == 2 and p["shape"][0] == p["shape"][1] > 1}
    most: dict[int, int] = {}
    for trace in window.traces:
        counts: Counter[int] = Counter()
        for op in trace.ops:
            if op.name == "@backward":
                counts.clear()
            elif op.grad and op.name in REPEATS:
                counts.update(u for t in op.ins for u in (trace.tensors[t].uid,) if u in square)
                most.update({u: max(n, most.get(u, 0)) for u, n in counts.items() if n > most.get(u, 0)})
    return {u: n for u, n in most.items() if n > 1}
