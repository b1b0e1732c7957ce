"""How strongly weight decay pulls against the gradient, from recorded norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from osler.core.facts import Fact
from osler.core.window import Window
from osler.rules.curve import matrices, newest

DECOUPLED = ("AdamW", "NAdamW", "RAdamW", "Lion", "Adafactor", "Muon", "SGDW")


@dataclass(frozen=True, slots=True)
class Pull:
    """Medians over the weight matrices of one optimizer.

    Attributes:
        strength: coefficient of the decay.
        force: decay times weights against the gradient (or against the step, where decay is decoupled), per sampled step.
        shrunk: last / first weight norm.
        decoupled: the decay acts on the weights, not on the gradient.
    """

    strength: float
    force: float
    late: float
    shrunk: float
    samples: int
    decoupled: bool


def decay_of(made: Fact) -> dict[int, float]:
    """Weight decay of each parameter, by uid."""
    groups, uids, found, at = made.get("groups") or (), made.get("uids") or [], {}, 0
    for group in groups:
        n = int(group.get("n") or 0)
        value = group.get("weight_decay")
        for uid in uids[at:at + n]:
            found[int(uid)] = float(value) if isinstance(value, int | float) else 0.0
        at += n
    return found


def is_decoupled(made: Fact) -> bool:
    return str(made.get("class")) in DECOUPLED or bool((made.get("defaults") or {}).get("decoupled_weight_decay"))


def pull(window: Window, made: Fact) -> Pull | None:
    decays = decay_of(made)
    rows = window.layers
    own = newest(window)
    wanted = [u for u in matrices(window) if decays.get(u, 0.0) > 0]
    if not len(rows) or not len(own) or not wanted:
        return None
    rows = rows[(rows["step"] >= own["step"][0]) & np.isin(rows["param"], wanted) & np.isfinite(rows["weight_norm"]) & (rows["weight_norm"] > 0)
                & (rows["grad_norm"] > 0) & (rows["update_norm"] > 0)]
    if len(rows) < 4:
        return None
    strength = np.array([decays[int(u)] for u in rows["param"]])
    weight, grad, update = (rows[k].astype(float) for k in ("weight_norm", "grad_norm", "update_norm"))
    if is_decoupled(made):
        lr = np.interp(rows["step"], own["step"][np.isfinite(own["lr"])], own["lr"][np.isfinite(own["lr"])].astype(float)) if np.isfinite(own["lr"]).any() else np.zeros(len(rows))
        share = np.clip(lr * strength * weight / update, 0.0, 0.9999)
        force = share / np.sqrt(1 - share ** 2)  # against the rest of the step, which is about at right angles to the weights
    else:
        force = strength * weight / np.maximum(grad, 1e-30)
    steps = np.unique(rows["step"])
    per_step = np.array([np.median(force[rows["step"] == s]) for s in steps])
    early = per_step[: max(2, len(per_step) // 3)]
    first = [weight[rows["param"] == u] for u in np.unique(rows["param"])]
    return Pull(float(np.median(strength)), float(np.median(early)), float(np.median(per_step[len(per_step) // 2:])), float(np.median([w[-1] / w[0] for w in first])),
                len(steps), is_decoupled(made))
