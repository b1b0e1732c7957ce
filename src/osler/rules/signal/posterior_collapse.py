from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import VIEWS, Op, Trace
from osler.core.window import Window
from osler.rules.curve import modules
from osler.rules.script import place

NOISE = frozenset(("randn_like", "randn", "normal", "new_empty"))


@rule("posterior-collapse", "signal")
def check(window: Window, *, silent: float = 0.05, narrow: float = 0.1) -> Iterator[Finding]:
    """The code of a variational autoencoder says nothing about its input.

    **What it is.** Every latent unit has mean 0 and deviation 1, whatever the input: the Kullback-Leibler term won, and the decoder gets noise alone.

    **How it is seen.** The program draws noise, multiplies it with the exponential of one layer and adds another layer (the mean). In the late samples the outputs of the
    mean layer deviate by less than `silent`, which carries less than `silent`² / 2 nat a unit, and those of the other layer lie within `narrow` of one value.

    **Why it matters.** Reconstructions are the mean of the data.

    **What to do.** Bring both terms to one scale (sum or mean over the same axes), anneal the weight of the KL term from 0, or leave it some free bits.

    **When this is wrong.** Early in a run codes are silent by initialisation; samples after the first quarter of the run count only. A note, since a few steps more may wake them.

    **Source.** Bowman et al., "Generating Sentences from a Continuous Space" (2016); He et al., "Lagging Inference Networks" (2019).
    """
    rows = window.stream("activations")
    rows = rows[rows["step"] >= 0.25 * window.n_steps]
    if not len(rows) or window.n_steps < 50:
        return
    for trace in window.traces:
        for op in trace.ops:
            found = code(trace, op)
            if found is None:
                continue
            mean, scale = (rows[rows["module"] == m] for m in found)
            if len(mean) < 2 or len(scale) < 2:
                continue
            spread, other = float(np.median(mean["std"])), float(np.median(scale["std"]))
            if spread < silent and other < narrow:
                at = place(modules(window).get(found[0], {}).get("at"))
                yield Finding(
                    "posterior-collapse", "measured", "note", f"The latent code carries nothing: its means deviate by {spread:.2g}",
                    "Bring reconstruction and KL term to one scale, anneal the KL weight from 0, or allow free bits.",
                    Where.at(op.at or at, module=str(modules(window).get(found[0], {}).get("name") or "")), first_step=int(rows["step"][0]), last_step=int(rows["step"][-1]),
                    evidence=(Evidence(f"outputs of the mean layer deviate by {spread:.3g}, those of the scale layer by {other:.3g}", "activations/std", spread, silent, len(mean)),))
                return


def code(trace: Trace, op: Op) -> tuple[int, int] | None:
    """Module ids of the mean and of the scale, if the operation adds a mean to scaled noise."""
    if op.name not in ("add", "add_") or len(op.ins) != 2:
        return None
    first, second = (back(trace, t, op) for t in op.ins)
    for mean, noise in ((first, second), (second, first)):
        if mean is None or noise is None or noise.name != "mul" or mean.module < 0 or len(noise.ins) != 2:
            continue
        parts = [back(trace, t, noise) for t in noise.ins]
        scale = next((p for p in parts if p is not None and p.name in ("exp", "exp_", "softplus")), None)
        if scale is not None and any(p is not None and p.name in NOISE for p in parts):
            made: Op | None = scale
            for _ in range(4):
                made = back(trace, made.ins[0], made) if made is not None and made.ins else None
                if made is not None and made.module >= 0 and made.name in ("linear", "conv2d", "conv1d"):
                    return mean.module, made.module
    return None


def back(trace: Trace, tid: int, op: Op) -> Op | None:
    here = trace.producer(tid, op.index)
    while here is not None and here.name in VIEWS and here.ins:
        here = trace.producer(here.ins[0], here.index)
    return here
