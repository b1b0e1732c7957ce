from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, modules, newest
from osler.rules.depth import growth, profile
from osler.rules.script import place
from osler.rules.signal.bad_init import guess

CLIP = "Clip between backward and step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
RECURRENT = ("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell", "RNNBase")


@rule("exploding-gradients", "signal")
def check(window: Window, *, ratio: float = 1e3, spike: float = 100.0, damage: float = 1.5, unlearned: float = 0.1, start: float = 10.0, far: float = 100.0) -> Iterator[Finding]:
    """The gradient grows on its way back through layers or time steps.

    **What it is.** Each layer (or time step) enlarges the gradient, so some steps are thrown far off.

    **How it is seen.** Through layers: the first third of the weight matrices gets `ratio` times the gradient per weight of the last
    third from the first samples on; or the outputs of eight or more layers grow a hundredfold along the depth while the first loss
    lies `start` times above that of a guess (`far` times where it fell later). Through time: a recurrent model whose gradient norm jumps to `spike` times its median,
    with no clipping in place. Otherwise only if it did harm: the loss became non-finite, ended no lower than it began, or lay
    `damage` times higher after the spike than before it.

    **Why it matters.** A single such step undoes what was learned, or ends the run.

    **What to do.** `clip_grad_norm_` between backward and step; normalisation; initialisation that keeps the scale.

    **When this is wrong.** Heavy-tailed losses spike without recurrence and recover; they are not reported.

    **Source.** Handbook A §24, B §11 (clip at 1.0); Pascanu et al. 2013.
    """
    if window.n_steps < 2:
        return
    line = curve(window)
    lost = nonfinite.first(window, "loss", "gradient", "parameter")
    if lost is not None and (nonfinite.from_data(window, lost) or lost.get("op_kind") not in (None, "unknown", "exp-overflow", "input", "parameter")):
        return
    failed = line is not None and line.one_sign and line.late >= (1 - unlearned) * line.start
    severity = "fatal" if nonfinite.lost(window) else "harmful"
    seen = profile(window)
    if seen is not None and len(seen.uids) >= 4 and (lost is not None or failed):
        found = float(np.median(seen.ends(seen.rms[: max(3, len(seen.rms) // 3)])))
        if found > ratio:
            yield Finding(
                "exploding-gradients", "measured", severity, f"The first layers get {found:.1e} times the gradient of the last ones",
                "Use an initialisation that keeps the scale (He, Xavier), normalisation, and clip the gradient norm at 1.", Where.at(line_of_step(window)),
                first_step=int(seen.steps[0]), last_step=int(seen.steps[-1]),
                evidence=(Evidence(f"gradient per weight, first third against last third of {len(seen.uids)} weight matrices: {found:.1e}",
                                   "layers/grad_norm", found, ratio, len(seen.steps)),), treatment="clip")
            return
    swollen = growth(window, guess(window), start)
    if swollen is not None and (lost is not None or failed or (guess(window) or 0.0) >= far):
        factor, count, made = swollen
        yield Finding(
            "exploding-gradients", "measured", severity, f"The signal grows {factor:.2g}-fold through {count} layers, and the gradient on its way back likewise",
            "Put a normalisation into each block, scale the branches down (by one over the square root of their number, or start their last layer at zero), or initialise smaller.",
            Where.at(made or line_of_step(window)), first_step=1, last_step=window.n_steps,
            evidence=(Evidence(f"deviation of the outputs, last against first of {count} layers: {factor:.2g}; the first loss is {guess(window) or float('nan'):.3g} times that of a guess",
                               "activations/std", factor, 100.0, count),), treatment="reinit", explains=("lr-too-high", "loss-diverged", "high-initial-loss", "dead-units", "loss-plateau"))
        return
    recurrent = next((m for m in modules(window).values() if m.get("class") in RECURRENT), None)
    clips = any((f.get("clipped") or 0) > 0 and f.get("position") == "after backward" for f in window.facts("clip"))
    rows = newest(window)
    norms = rows["grad_norm"].astype(float)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if recurrent is None or clips:
        return
    before = rows["grad_norm"][rows["step"] <= lost.step] if lost is not None else rows["grad_norm"][:0]
    blown = bool(np.isinf(before).any() or np.nanmax(before, initial=0.0) > 1e6)
    if blown or len(norms) < 3:
        if blown and lost is not None:
            top = float(np.nanmax(before))
            yield Finding(
                "exploding-gradients", "measured", severity, f"The gradient norm of a recurrent model was {top:.3g} before the loss was lost", CLIP,
                Where.at(line_of_step(window), module=str(recurrent.get("name") or "") or None), first_step=1, last_step=lost.step,
                evidence=(Evidence(f"gradient norm {top:.3g} by step {lost.step}, in a model with {recurrent.get('class')}; nothing clips it",
                                   "steps/grad_norm", top, 1e6, len(before)),), treatment="clip")
        return
    height = float(norms.max() / np.median(norms))
    hurt = damaged(window, damage)
    if (height >= spike and (lost is not None or hurt)) or (lost is not None and lost.get("what") == "gradient" and lost.get("value") == "inf"):
        yield Finding(
            "exploding-gradients", "measured", severity, f"The gradient norm jumps to {height:.3g} times its median, and nothing clips it",
            CLIP,
            Where.at(line_of_step(window), module=str(recurrent.get("name") or "") or None), first_step=1, last_step=window.n_steps,
            evidence=(Evidence(f"largest gradient norm {norms.max():.3g}, median {np.median(norms):.3g}, in a model with {recurrent.get('class')}",
                               "steps/grad_norm", height, spike, len(norms)),), treatment="clip")


def damaged(window: Window, factor: float) -> bool:
    """The loss lay higher for a while after the largest gradient than before it."""
    rows = newest(window)
    rows = rows[np.isfinite(rows["loss"]) & np.isfinite(rows["grad_norm"])]
    if len(rows) < 30:
        return False
    at = int(np.argmax(rows["grad_norm"]))
    before, after = rows["loss"][max(0, at - 20):at], rows["loss"][at + 1:at + 21]
    return bool(len(before) >= 5 and len(after) >= 5 and np.median(before) > 0 and np.median(after) > factor * np.median(before))


def line_of_step(window: Window) -> Location | None:
    counts = window.last("cycle")
    lines = [o.get("last_lines") or {} for o in (counts.get("optimizers") or ())] if counts is not None else []
    return next((p for row in lines if (p := place(row.get("step"))) is not None), None)
