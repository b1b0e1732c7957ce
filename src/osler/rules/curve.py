"""Robust figures of the training loss and of the steps taken: start and late level, update ratios, promised descent.

All are relative to the run itself. A curve of several optimizers in turn (a GAN) or of either sign (a policy gradient) has no
level worth comparing, and the functions here say so instead of returning one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from osler.core.facts import Fact
from osler.core.window import Window

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """The loss of the newest optimizer's steps (finite ones).

    Attributes:
        steps, loss: step numbers and values.
        first: the very first value.
        start: median of the first few values; late: median of the last tenth; low: lowest running median.
        noise: scatter between neighbouring values in the late half (scaled median absolute difference).
    """

    steps: npt.NDArray[np.int64]
    loss: Floats
    first: float
    start: float
    late: float
    low: float
    noise: float

    @property
    def n(self) -> int:
        return len(self.loss)

    @property
    def one_sign(self) -> bool:
        """The values stay on the positive side, so that ratios of them mean something."""
        return bool((self.loss > 0).mean() > 0.99)

    @property
    def fall(self) -> float:
        """Share of the start level that is gone at the end; negative when the loss rose."""
        return 1 - self.late / self.start if self.start > 0 else 0.0


def in_turn(window: Window) -> bool:
    """Several optimizers step alternately (GAN, actor and critic, sparse and dense parameters)."""
    who = window.steps["optimizer"]
    return bool(len(who) > 3 and (np.diff(who) != 0).sum() > 2 * len(np.unique(who)))


def newest(window: Window) -> np.ndarray:
    """Rows of the optimizer that stepped last: a sweep or a second stage is judged by itself."""
    rows = window.steps
    return rows[rows["optimizer"] == rows["optimizer"][-1]] if len(rows) else rows


def curve(window: Window, least: int = 20) -> Curve | None:
    """``None`` where the loss was not seen often enough or several optimizers take turns."""
    rows = newest(window)
    rows = rows[np.isfinite(rows["loss"])]
    if len(rows) < least or in_turn(window):
        return None
    loss = rows["loss"].astype(np.float64)
    head, tail = min(10, max(3, len(loss) // 20)), max(5, len(loss) // 10)
    running = np.array([np.median(part) for part in np.array_split(loss, max(2, min(50, len(loss) // 5)))])
    half = loss[len(loss) // 2:]
    noise = float(np.median(np.abs(np.diff(half)))) * 1.05 if len(half) > 2 else 0.0
    return Curve(rows["step"].astype(np.int64), loss, float(loss[0]), float(np.median(loss[:head])), float(np.median(loss[-tail:])),
                 float(running.min()), noise)


def parameters(window: Window) -> dict[int, dict[str, Any]]:
    """Newest description of each parameter by uid."""
    return {p["uid"]: p for f in window.facts("params") for p in f.get("params") or () if isinstance(p, dict) and "uid" in p}


def modules(window: Window) -> dict[int, dict[str, Any]]:
    return {m["id"]: m for f in window.facts("modules") for m in f.get("modules") or () if isinstance(m, dict) and "id" in m}


def matrices(window: Window) -> list[int]:
    """Uids of weight matrices and kernels that an optimizer holds, in order of registration; embeddings are left out."""
    classes = {i: str(m.get("class", "")) for i, m in modules(window).items()}
    found = []
    for uid, p in parameters(window).items():
        shape, owner = p.get("shape") or (), p.get("module")
        if isinstance(shape, list | tuple) and len(shape) >= 2 and min(shape) >= 1 and p.get("optimizer") is not None \
                and "Embedding" not in classes.get(owner if isinstance(owner, int) else -1, ""):
            found.append(uid)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Motion:
    """How far the steps moved the weights.

    Attributes:
        steps: sampled steps.
        ratio: median over weight matrices of |change| / |weights|, per sampled step.
        promise: first-order fall of the loss bought by the step, over all parameters, per sampled step.
        growth: median over matrices of last / first weight norm.
        layers: how many matrices were seen.
    """

    steps: npt.NDArray[np.int64]
    ratio: Floats
    promise: Floats
    growth: float
    layers: int


def motion(window: Window) -> Motion | None:
    rows = window.layers
    own = newest(window)
    if not len(rows) or not len(own):
        return None
    rows = rows[(rows["step"] >= own["step"][0]) & np.isfinite(rows["update_norm"]) & np.isfinite(rows["weight_norm"])]
    wanted = matrices(window)
    chosen = rows[np.isin(rows["param"], wanted) & (rows["weight_norm"] > 0)]
    if not len(chosen):
        return None
    steps = np.unique(chosen["step"])
    held = sum(p.get("optimizer") is not None for p in parameters(window).values()) or 1
    ratio, promise = np.empty(len(steps)), np.empty(len(steps))
    for i, step in enumerate(steps):
        here = chosen[chosen["step"] == step]
        ratio[i] = np.median(here["update_norm"].astype(float) / here["weight_norm"])
        every = rows[rows["step"] == step]
        promise[i] = np.nansum(every["descent"].astype(float)) * max(1.0, held / max(len(every), 1))
    growth = [float(w[-1] / w[0]) for uid in np.unique(chosen["param"])
              for w in [chosen["weight_norm"][chosen["param"] == uid]] if w[0] > 0]
    return Motion(steps.astype(np.int64), ratio, promise, float(np.median(growth)), len(np.unique(chosen["param"])))


def optimizer(window: Window) -> Fact | None:
    """The fact of the optimizer that stepped last."""
    own = newest(window)
    found = [f for f in window.facts("optimizer") if not len(own) or f.get("index") == int(own["optimizer"][-1])]
    return found[-1] if found else window.last("optimizer")


def loaded(window: Window) -> bool:
    """Whether a good part of the weights came from a checkpoint: the loss need not fall then."""
    every = list(parameters(window).values())
    return bool(every) and sum(bool(p.get("loaded")) or bool(p.get("stepped")) for p in every) > 0.3 * len(every)
