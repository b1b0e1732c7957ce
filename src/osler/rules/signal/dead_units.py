from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, modules, newest, parameters
from osler.rules.script import place

SQUASH = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")
RECTIFIERS = ("ReLU", "ReLU6", "Threshold", "Hardtanh", "Hardswish", "Hardsigmoid", "RReLU")


@rule("dead-units", "signal")
def check(window: Window, *, dead: float = 0.8, unlearned: float = 0.1, min_samples: int = 1, min_batch: int = 8) -> Iterator[Finding | NotChecked]:
    """Most units of a layer are zero for every sample.

    **What it is.** Rectified units whose input is negative for all data: output and gradient are exactly 0, so they cannot
    come back.

    **How it is seen.** In the late samples (or all, where the run was sampled early only) a share `dead` of a rectifier's units is zero for every row of the batch (of `min_batch`
    rows or more); where no rectifier module is there to look at, the same share of a bias gradient is exactly 0. And the loss has
    fallen by less than `unlearned`: the dead layer blocks the network.

    **Why it matters.** The capacity behind these units is lost; a layer that is dead as a whole cuts the network in two.

    **What to do.** Lower the learning rate or use a warm-up, He initialisation, leaky activations.

    **When this is wrong.** A rectifier behind a stack of sigmoids sees nearly the same for all samples: nothing is said there. Sparsity that is asked for. Zeros per element say nothing; only units that are zero for all rows count,
    and where the loss falls nothing is said.

    **Source.** Handbook A §24 (⚠ a negative pre-activation is not death), which advises action from 30 %.
    """
    line = curve(window)
    if line is None:
        yield NotChecked("dead-units", "needs the loss of one optimizer over at least 20 steps")
        return
    if not line.one_sign or line.fall > unlearned or squashed(window):
        return
    known = modules(window)
    rows = window.stream("activations")
    last = int(newest(window)["step"][-1])
    rows = rows[rows["step"] >= last // 2] if (rows["step"] >= last // 2).any() else rows
    worst: tuple[float, int, int] | None = None
    for module in np.unique(rows["module"]):
        share = rows[rows["module"] == module]["dead_share"]
        share = share[np.isfinite(share)]
        if known.get(int(module), {}).get("class") in RECTIFIERS and len(share) >= min_samples:
            found = float(np.median(share))
            if found >= dead and (worst is None or found > worst[0]):
                worst = (found, int(module), len(share))
    sizes = window.stream("batches")["size"]
    if len(sizes) and np.median(sizes) < min_batch:
        return
    if worst is not None:
        m = known[worst[1]]
        at, name = place(m.get("at")), str(m.get("name"))
        what, signal = f"units of {name}", "activations/dead_share"
    else:
        since = last // 2 if (window.layers["step"] >= last // 2).any() else 0
        bias = dead_bias(window, since, min_samples)
        if bias is None or bias[0] < dead:
            return
        worst = bias
        p = parameters(window)[bias[1]]
        at, name = place(known.get(p.get("module", -1), {}).get("at")), str(p.get("name"))
        what, signal = f"gradient elements of {name}", "layers/zero_share"
    yield Finding(
        "dead-units", "measured", "harmful", f"{worst[0]:.0%} of the {what} are zero for every sample",
        "Lower the learning rate or warm up; He initialisation; or leaky activations (LeakyReLU(0.1), GELU).",
        Where.at(at, module=name), first_step=int(line.steps[0]), last_step=last,
        evidence=(Evidence(f"{worst[0]:.0%} are exactly 0 for all rows of a batch, in the median of {worst[2]} samples", signal, worst[0], dead, worst[2]),
                  Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, unlearned, line.n)),
        treatment="activation-leaky")


def squashed(window: Window, many: int = 3) -> bool:
    """A stack of saturating functions, more of them than rectifiers: what reaches the rectifier does not depend on the sample any more,
    so that its units are on or off for all; death is not what is wrong."""
    classes = [str(m.get("class")) for m in modules(window).values()]
    rectifiers = sum(c in RECTIFIERS for c in classes)
    return sum(c in SQUASH for c in classes) >= max(many, rectifiers + 1)


def dead_bias(window: Window, since: int, min_samples: int) -> tuple[float, int, int] | None:
    """(share, uid, samples) of the bias whose gradient has most exact zeros; the last bias of a model is its output."""
    rows = window.layers
    rows = rows[(rows["step"] >= since) & np.isfinite(rows["zero_share"]) & np.isfinite(rows["grad_norm"])]
    found = []
    for uid, p in parameters(window).items():
        share = rows[rows["param"] == uid]["zero_share"]
        if str(p.get("name", "")).endswith("bias") and len(p.get("shape") or ()) == 1 and p["shape"][0] >= 4 and len(share) >= min_samples:
            found.append((float(np.median(share)), uid, len(share)))
    found = [f for f in found if f[0] < 1.0] or found
    return max(found, default=None)
