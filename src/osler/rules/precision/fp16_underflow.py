from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import scaling
from osler.rules.code_questions import nodes
from osler.rules.script import call_name, words

SMALLEST = 2.0**-24
EFFECTS = ("vanishing-gradients", "loss-plateau", "lr-too-low", "params-not-moving", "dead-units", "unused-module", "log-of-zero", "division-by-zero", "loss-scale")


@rule("fp16-underflow", "precision")
def check(window: Window, *, lost: float = 0.3, samples: int = 2, product: float = 0.5) -> Iterator[Finding]:
    """Gradients vanish in float16 for want of loss scaling, or values do.

    **What it is.** float16 has nothing between 0 and 6e-8, and loses precision below 6e-5. The gradients of a mean over many pixels, of a
    loss with a small weight, or of the first layers of a deep model lie there; without a GradScaler they are exactly 0. So are
    products of many probabilities.

    **How it is seen.** float16 took part, no scaler was at work (or one with a tiny scale), and in sampled steps some weight lost at
    least `lost` of its gradient: elements that are exactly 0 in a weight half of whose other elements lie on the
    coarse grid below 2^-14; or all of it, where other weights are that small or have none either. Or a recorded product of numbers none of which was 0 came out 0 for a share of `product`.

    **Why it matters.** What is 0 does not learn; the rest moves on one or two bits.

    **What to do.** `scaler = torch.amp.GradScaler(device)`, `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`;
    or bfloat16, which has the range of float32. Sum logarithms instead of multiplying probabilities.

    **When this is wrong.** Zeros of dead units or empty inputs do not count: they come with ordinary values beside them. At the end of a
    training every gradient is small; the first samples decide.

    **Source.** Handbook A §13 (⚠ a cross-entropy needs more scale rather than less, and scaling does not cure an overflow); Micikevicius et al. 2018.
    """
    live = [f for f in scaling.active(window) if (f.get("scales") or 0) > 0]
    scales = [s for f in live for _, s in (f.get("history") or ())] or [float(f.get("init_scale") or 0.0) for f in live]
    by_hand = [h for h in scaling.hand_scales(window) if h.value is None or h.value >= 8]
    tiny_scale = bool(scales) and 0 < float(np.median(scales)) <= 8.0
    if (not live or tiny_scale) and not by_hand:
        scale = float(np.median(scales)) if tiny_scale else 1.0
        known = layers(window, samples)
        marked = [r for r in known if r.zero < 1 and r.median * scale < 2.0**-14]
        silent = len(known) > 1 and all(r.zero >= 0.999 for r in known)
        gone = [r for r in known if (r in marked and r.zero >= lost) or (r.zero >= 0.999 and (marked or silent))]
        if gone:
            worst = max(gone, key=lambda r: r.zero)
            at = next((f.at for f in live), None) if tiny_scale else switched_off(window) or first_autocast(window)
            yield Finding(
                "fp16-underflow", "measured", "harmful",
                f"{worst.zero:.0%} of the gradient of {worst.name} is exactly 0 in float16" + (f": the loss scale is {scale:.3g}" if tiny_scale else ", with no loss scaling"),
                "Scale the loss: a GradScaler with its default scale of 2^16 (or use bfloat16)." if not tiny_scale else "Let the scaler start at its default of 2^16.",
                Where.at(at, parameter=worst.name),
                evidence=(Evidence(f"median over the first {worst.n} samples: {worst.zero:.3f} exactly 0, the others around {worst.median:.2g}; {len(gone)} of {len(known)} weights lose their gradient",
                                   "half-gradients", worst.zero, lost, worst.n),), explains=EFFECTS, treatment="fp32")
            return
    for trace in window.traces:
        for op in trace.ops:
            share = op.values.get("underflow")
            if op.name in ("prod", "cumprod", "mul", "pow", "square") and op.grad and isinstance(share, int | float) and share >= product and op.at is not None:
                yield Finding("fp16-underflow", "measured", "harmful", f"{op.name} underflows in float16: {share:.0%} of the results are 0 though no factor was",
                              "Sum logarithms, or multiply in float32.", Where.at(op.at), first_step=op.step,
                              evidence=(Evidence(f"step {op.step}: {share:.2f} of the results are exactly 0", "trace", float(share), product, 1),), explains=EFFECTS, treatment="fp32")
                return


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight's early gradients: share of exact zeros, median of the other magnitudes, samples."""

    name: str
    zero: float
    median: float
    n: int


def layers(window: Window, samples: int) -> list[Layer]:
    newest = window.last("half-gradients")
    found = []
    for row in (newest.get("params") or ()) if newest is not None else ():
        seen = row.get("samples") or []
        early = [s for s in seen if s[0] - seen[0][0] <= 20]
        known = parameter(window, row.get("uid"))
        shape: Any = known.get("shape")
        if len(early) >= samples and isinstance(shape, list) and len(shape) >= 2:
            found.append(Layer(str(known.get("name")), float(np.median([s[1] for s in early])), float(np.median([s[4] for s in early])), len(early)))
    return found


def parameter(window: Window, uid: object) -> dict[str, Any]:
    return next((p for f in reversed(window.facts("params")) for p in f.get("params") or () if p.get("uid") == uid), {})


def switched_off(window: Window) -> Location | None:
    """A gradient scaler that was built with ``enabled=False``."""
    found = [f.at for f in window.facts("scaler") if f.get("enabled") is False and f.at is not None]
    return found[-1] if found and not scaling.active(window) else None


def first_autocast(window: Window) -> Location | None:
    """The disabled scaler, or the `autocast` whose forward pass the losses come from: the one in float16 that encloses a training step."""
    found = nodes(window, lambda n: isinstance(n, ast.Call) and call_name(n) in ("autocast", "half") and (call_name(n) == "half" or bool({"float16", "half"} & words(n)) or not n.keywords))
    lines = [f.at for f in window.facts("backward") if f.at is not None]
    near = [at for at, _ in found if lines and at.file == lines[0].file and at.line <= lines[0].line]
    return near[-1] if near else found[0][0] if found else lines[0] if lines else None
