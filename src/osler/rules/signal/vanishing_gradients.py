from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, modules, parameters
from osler.rules.depth import profile
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
    again = through_time(window) if line is not None and line.fall < unlearned / 2 else None
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


def through_time(window: Window, least: int = 20, gain_limit: float = 0.5, left: float = 1e-6) -> tuple[int, int, float] | None:
    """A square weight applied at every time step of a pass, so small at the start that half the steps take all but `left` of a signal: uid, steps, gain."""
    known = parameters(window)
    square = {u: gain(p) for u, p in known.items() if len(p.get("shape") or ()) == 2 and p["shape"][0] == p["shape"][1] and (init(p).get("std") or 0) > 0 and not p.get("loaded")}
    for trace in window.traces:
        counts: Counter[int] = Counter()
        for op in trace.ops:
            if op.name == "@backward":
                break
            counts.update(u for t in op.ins for u in (trace.tensors[t].uid,) if u in square and op.grad and op.name in ("linear", "matmul", "mm", "addmm"))
        for uid, times in counts.items():
            if times >= least and square[uid] < gain_limit and square[uid] ** (times / 2) < left:
                return uid, times, square[uid]
    return None


def op_line(window: Window) -> Location | None:
    """First saturating function called in a forward pass."""
    return next((op.at for t in window.traces for op in t.named("sigmoid", "tanh") if op.at is not None and op.grad), None)
