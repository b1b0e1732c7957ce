from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules import nonfinite, scaling
from osler.rules.code_questions import statement

LARGEST = 65504.0
VANISHES = 2.0**-25
EFFECTS = ("loss-nan", "nonfinite-gradient", "loss-plateau", "loss-diverged", "exploding-gradients", "log-of-zero", "division-by-zero", "singular-gradient", "nonfinite-input",
           "attention-mask", "step-missing-or-rare", "dead-units", "vanishing-gradients", "lr-too-high", "lr-too-low", "input-scale", "fp16-underflow", "unused-module",
           "graph-broken", "script-failed")
FIX = "Do this in float32: cast with .float() before, and back after (autocast does not upcast products and powers)."


@rule("fp16-overflow", "precision")
def check(window: Window, *, longest: int = 12, share: float = 0.3, collapsed: float = 1e-3) -> Iterator[Finding]:
    """A value above 65504 becomes infinite in float16.

    **What it is.** float16 ends at 65504: squares and sums of squares in a norm written by hand, `exp` above 11, long dot
    products, a mask of -1e9, a loss summed over a batch. And constants below 6e-8 are 0 in it, so `x / (n + 1e-8)` divides by zero.

    **How it is seen.** In the recorded steps, and in one recorded after two skipped steps in a row, an operation with a float16 side
    made infinities or NaN of finite operands. Else the first non-finite loss met a float16 operand. Else the scaler skipped `share`
    of the steps, `longest` in a row among them, or its scale fell below `collapsed`. Or torch refused a constant that float16 cannot hold.

    **Why it matters.** The infinity turns into NaN in the next difference or quotient, or into a layer whose output is 0 for ever;
    a GradScaler then skips every step and halves its scale down to nothing.

    **What to do.** Take such statistics in float32; use `torch.finfo(x.dtype).min` for masks and an eps of 1e-5; or use bfloat16.

    **When this is wrong.** The skipped first steps of a scaler that starts too high are its daily work and not reported; a mask
    that is added at the lower end of float16 may round to minus infinity on purpose and is not either.

    **Source.** Handbook A §13 and §23 (⚠ exp overflows at 88.7 in float32 and bfloat16, at 11.1 in float16; ⚠ 1e-8 is 0 in float16;
    ⚠ autocast does not upcast elementwise products; ⚠ more loss scaling does not cure an overflow); pytorch issue 66707.
    """
    for e in window.facts("exception"):
        if re.search(r"cannot be converted to type (at::)?Half without overflow|value cannot be converted to type .*Half", str(e.get("message"))):
            yield Finding("fp16-overflow", "certain", "fatal", "A constant does not fit into float16: torch refuses", "Use torch.finfo(x.dtype).min (or -inf) for the mask.",
                          Where.at(e.at), first_step=e.step, evidence=(Evidence(f"{e.get('type')}: {e.get('message')}", "exception", None, LARGEST, 1),),
                          explains=("script-failed", "step-missing-or-rare"))
            return
    op = overflow(window)
    if op is not None:
        figures = op.values["overflow"]
        lost = nonfinite.lost(window) or any(f.get("longest", 0) >= longest for f in scaling.active(window))
        inner = op.at
        largest = float(figures.get("largest") or 0.0)
        zero = bool(figures.get("zero")) and op.name in nonfinite.QUOTIENTS | nonfinite.LOGARITHMS
        yield Finding(
            "fp16-overflow", "certain", "fatal" if lost else "harmful",
            f"{op.name} divides by what float16 rounds to zero" if zero else
            f"{op.name} overflows in float16: {figures['nonfinite']} of {figures['numel']} values of operands up to {largest:.4g}",
            "Use an eps that float16 can hold (1e-5), or compute this in float32." if zero else FIX, Where.at(inner, also=tuple(str(u) for u in op.up[:2])),
            first_step=op.step, evidence=(Evidence(f"step {op.step}: every operand was finite, {figures['nonfinite']} results are not", "trace", largest, LARGEST,
                                                   int(figures["numel"])),), treatment="fp32", explains=EFFECTS)
        return
    made = tiny_eps(window)
    if made is not None:
        yield made
        return
    for f in nonfinite.facts(window):
        o = nonfinite.operand(f)
        if f.get("before_step") is False or o.get("dtype") != "float16" or f.get("what") not in nonfinite.FORWARD:
            continue
        at = nonfinite.place(window, f)
        rounded = vanishing_constant(window, at)
        if f.get("op_kind") in ("log-of-zero", "division-by-zero", "log-of-negative", "sqrt-of-negative") and rounded is None:
            continue  # zero (or less) in any precision
        yield Finding("fp16-overflow", "certain" if rounded or nonfinite.overflowed_half(f) else "measured", nonfinite.severity(window),
                      f"{rounded} is 0 in float16, so the loss became {f.get('value', 'non-finite')}" if rounded else
                      f"The loss became {f.get('value', 'non-finite')} in float16: {nonfinite.describe(f)}",
                      "Use an eps that float16 can hold (1e-5), or compute this in float32." if rounded else FIX,
                      Where.at(at), first_step=f.step, evidence=(nonfinite.evidence(f),), treatment="fp32", explains=EFFECTS)
        return
    yield from collapse(window, longest, share, collapsed)


def overflow(window: Window) -> Op | None:
    """The first operation of the recorded steps that overflowed, the scaled loss and masks at the end of the range left out."""
    for trace in window.traces:
        for op in trace.ops:
            figures = op.values.get("overflow")
            if not figures or op.at is None or op.name.startswith("@"):
                continue
            text = window.line(op.at.file, op.at.line)
            kinds = {trace.tensors[t].dtype for t in (*op.ins, *op.outs)}
            if "float16" not in kinds or re.search(r"\.(scale|unscale_)\(", text) or re.search(r"scaler\.(step|update)\(", text):
                continue
            if op.name in ("add", "add_", "sub", "sub_") and float(figures.get("largest") or 0.0) >= 6e4 and not figures.get("nan"):
                continue
            return op
    return None


def vanishing_constant(window: Window, at: Location | None) -> str | None:
    """A constant on the line (or bound to a name on it) that is not 0 but rounds to 0 in float16."""
    node = statement(window, at)
    if node is None or at is None:
        return None
    for n in ast.walk(node):
        value = scaling.number(n) if isinstance(n, ast.Constant) else scaling.value_of(window, at.file, scaling.last(n), at.line) if isinstance(n, ast.Name | ast.Attribute) \
            and re.search(r"eps|tiny|small|delta", scaling.last(n), re.I) else None
        if value is not None and 0 < abs(value) < VANISHES:
            return f"{value:g}"
    return None


def tiny_eps(window: Window) -> Finding | None:
    """float16 weights under an Adam whose eps is 0 in float16: 0/0 wherever a gradient is small."""
    halves = {p.get("uid") for f in window.facts("params") for p in f.get("params") or () if p.get("dtype") == "float16"}
    lost = next((f for f in nonfinite.facts(window) if f.get("op_kind") == "parameter" or f.get("what") == "parameter" or f.get("before_step") is False), None)
    for f in window.facts("optimizer"):
        eps = (f.get("defaults") or {}).get("eps")
        own = set(f.get("uids") or ())
        if lost is not None and isinstance(eps, float) and 0 < eps < VANISHES and own and len(own & halves) * 2 >= len(own):
            return Finding("fp16-overflow", "certain", "fatal", f"{f.get('class')} divides float16 moments by eps = {eps:g}, which is 0 in float16",
                           "Keep float32 weights (autocast for the arithmetic), or at least eps=1e-4.", Where.at(f.at), first_step=lost.step,
                           evidence=(Evidence(f"{len(own & halves)} of {len(own)} parameters are float16, eps {eps:g}; weights were NaN after step {lost.step}", "optimizer", eps, VANISHES, len(own)),),
                           treatment="fp32", explains=EFFECTS)
    return None


def collapse(window: Window, longest: int, share: float, collapsed: float) -> Iterator[Finding]:
    """No operation was seen, but the scaler skipped steps to the end or lowered its scale to nothing."""
    wide = [f for f in nonfinite.facts(window) if f.get("what") in nonfinite.FORWARD and nonfinite.operand(f).get("dtype") == "float32"]
    for f in scaling.active(window):
        steps, skipped, scales = int(f.get("steps") or 0), int(f.get("skipped") or 0), [s for _, s in f.get("history") or () if isinstance(s, int | float) and s == s]
        if steps < 20 or wide or int(f.get("instances") or 1) > 2:
            continue
        last = scales[-1] if scales else 1.0
        stuck = len(scales) > 2 and min(scales[-3:]) >= 0.999 * max(scales[:3])
        if not stuck and ((skipped > share * steps and int(f.get("longest") or 0) >= longest) or 0 < last < collapsed):
            yield Finding("fp16-overflow", "measured", "harmful", f"{skipped} of {steps} steps overflowed and were skipped; the loss scale fell to {last:.3g}",
                          "Find the layer whose activations or gradients leave float16 and compute it in float32, or use bfloat16.",
                          Where.at(scaling_line(f)), evidence=(Evidence(f"{skipped} of {steps} steps skipped, {f.get('longest')} in a row, scale {last:.3g}", "scaler", skipped / steps, share, steps),),
                          treatment="fp32", explains=EFFECTS)


def scaling_line(f: Fact) -> Location | None:
    return Location.from_json((f.get("lines") or {}).get("scales")) or f.at
