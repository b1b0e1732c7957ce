from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, modules, parameters
from osler.rules.depth import profile, through_time
from osler.rules.script import place
from osler.rules.signal.bad_init import RANDOM, gain, init, written

SQUASH = ("Sigmoid", "Tanh", "Softsign", "LogSigmoid")


@rule("vanishing-gradients", "signal")
def check(window: Window, *, ratio: float = 1e-3, unlearned: float = 0.2, min_depth: int = 4, min_samples: int = 1) -> Iterator[Finding | NotChecked]:
    """The gradient dies on its way to the first layers.

    **What it is.** Each layer shrinks the gradient (saturating activations, small initial weights, no residual path), so the
    layers near the input get next to none.

    **How it is seen.** Root-mean-square gradient per weight, layer by layer, at sampled steps: in a stack of `min_depth` or more
    weight matrices the first third has less than `ratio` of the last third (healthy stacks stay above 0.01), and the loss
    has fallen by less than `unlearned`.

    **Why it matters.** The first layers stay random, so the rest learns from noise.

    **What to do.** ReLU-like activations with matching initialisation (He), normalisation, residual connections.

    **When this is wrong.** Where the loss falls well nothing is said: adaptive optimizers bridge large ratios. Gradients that
    vanish over time steps are not visible per layer; they are told by the initial size of a square weight that is applied twenty times or more in one pass.

    **Source.** Handbook A §24; AutoTrainer (ICSE 2021); Glorot and Bengio 2010.
    """
    seen = profile(window)
    line = curve(window)
    again = forgotten(window) if line is not None and line.fall < unlearned / 2 else None
    if again is not None and line is not None:
        uid, times, size = again
        p = parameters(window)[uid]
        yield Finding(
            "vanishing-gradients", "measured", "harmful", f"The recurrent weights shrink the state to {size:.2g} of its size at each of {times} time steps: nothing comes back from the first ones",
            "Start them orthogonal or as the identity (orthogonal_, eye_), use an LSTM or GRU, or shorten the sequences.",
            Where.at(written(window, RANDOM) or place(modules(window).get(p.get("module", -1), {}).get("at")), parameter=str(p.get("name"))), first_step=0, last_step=int(line.steps[-1]),
            evidence=(Evidence(f"std times square root of fan-in {size:.2g}; over {times} steps {size ** times:.1e}", "params", size, 0.5, times),
                      Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, unlearned / 2, line.n)), treatment="reinit")
        return
    if seen is None or line is None or len(seen.steps) < min_samples or len(seen.uids) < min_depth:
        yield NotChecked("vanishing-gradients", f"the model has fewer than {min_depth} stacked weight matrices" if seen is not None and len(seen.uids) < min_depth
                         else f"fewer than {min_samples} samples of the gradients of {min_depth} stacked weight matrices")
        return
    late = seen.rms[len(seen.steps) // 2:]
    found = float(np.median(seen.ends(late)))
    if not 0 < found < ratio or line.fall > unlearned:
        return
    known = parameters(window)
    squash = next((place(m.get("at")) for m in modules(window).values() if m.get("class") in SQUASH), None)
    at = squash or op_line(window) or place(modules(window).get(known[seen.uids[0]].get("module", -1), {}).get("at"))
    name = str(known[seen.uids[0]].get("name"))
    yield Finding(
        "vanishing-gradients", "measured", "harmful", f"The first layers get {found:.1e} of the gradient of the last ones",
        "Use ReLU-like activations with He initialisation, normalisation between layers, or residual connections.",
        Where.at(at, parameter=name), first_step=int(seen.steps[0]), last_step=int(seen.steps[-1]),
        evidence=(Evidence(f"gradient per weight, first third against last third of {len(seen.uids)} weight matrices: {found:.1e} "
                           f"(median of {len(late)} sample{'s' * (len(late) != 1)})", "layers/grad_norm", found, ratio, len(late)),
                  Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, unlearned, line.n)),
        treatment="activation-leaky")


def forgotten(window: Window, least: int = 20, limit: float = 0.5, left: float = 1e-6) -> tuple[int, int, float] | None:
    """A square weight applied at every time step of a pass, so small at the start that half the steps take all but `left` of a signal: uid, steps, gain."""
    known = parameters(window)
    for uid, times in through_time(window).items():
        size = gain(known[uid]) if (init(known[uid]).get("std") or 0) > 0 and not known[uid].get("loaded") else limit
        if times >= least and size < limit and size ** (times / 2) < left:
            return uid, times, size
    return None


def op_line(window: Window) -> Location | None:
    """First saturating function called in a forward pass."""
    return next((op.at for t in window.traces for op in t.named("sigmoid", "tanh") if op.at is not None and op.grad), None)
