from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite


@rule("division-by-zero", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """A division by zero in the forward pass.

    **What it is.** A denominator is exactly 0: an empty mask in a Dice loss, a norm or standard deviation of identical
    values, a count of selected rows that is 0 (or a mean over an empty selection), a negative power of 0, `rsqrt(0)`.

    **How it is seen.** At the first non-finite loss the divisor saved in the graph holds exact zeros while it is finite
    otherwise. Where no gradient passes (counts, inputs scaled inside the model), the batch was finite, the first operation on the
    graph met a NaN, and the recorded program has a quotient in between.

    **Why it matters.** 0/0 is NaN; one row of it turns the mean, and then all weights, into NaN.

    **What to do.** Add eps to the denominator (and to the numerator where 0/0 should be 1), in float32: `(a + eps) / (b + eps)`;
    `x * torch.rsqrt(var + eps)`; `sum / count.clamp(min=1)`. 1e-8 vanishes in float16.

    **When this is wrong.** A quotient whose non-finite elements are masked before they reach the loss is not reported.

    **Source.** Handbook A §23; MONAI issue 120.
    """
    for fact in nonfinite.facts(window):
        made = nonfinite.on_the_way(window, fact)
        if made is not None and made.name in nonfinite.QUOTIENTS | nonfinite.SPREADS:
            o = nonfinite.operand(fact)
            spread = made.name in nonfinite.SPREADS
            yield Finding(
                "division-by-zero", "measured", nonfinite.severity(window),
                f"Division by zero: {o.get('nan') or o.get('nonfinite')} of {o.get('numel', 'the')} values made from finite figures are not finite",
                "The standard deviation of a single value is 0/0: skip the scaling then, or use unbiased=False and eps." if spread and o.get("numel") == 1 else
                "Add a smoothing constant to the denominator, or clamp it: x / n.clamp(min=1).",
                Where.at(made.at, also=(str(fact.at),) if fact.at is not None and fact.at != made.at else ()), first_step=fact.step, last_step=fact.step,
                evidence=(Evidence(f"step {fact.step}: {made.name} lies on the way from finite figures to {str(fact.get('op')).removesuffix('Backward0')}, "
                                   "whose operand holds NaN; weights were still finite", "nonfinite", nonfinite.number(o.get("nonfinite")), 0.0, int(nonfinite.number(o.get("numel")) or 1)),))
            return
        if fact.get("op_kind") != "division-by-zero" or fact.get("what") not in nonfinite.FORWARD:
            continue
        o = nonfinite.operand(fact)
        op = str(fact.get("op") or "")
        if o.get("empty"):
            yield Finding(
                "division-by-zero", "certain", nonfinite.severity(window),
                f"A mean over nothing: {op.removesuffix('Backward0')} of shape {tuple(o.get('shape') or ())}" + (", every target ignored" if op.startswith("Nll") else ""),
                "Leave this term out where the selection is empty, or sum and divide by max(count, 1).",
                Where.at(nonfinite.place(window, fact), module=fact.get("module")), first_step=fact.step, last_step=fact.step,
                evidence=(Evidence(f"step {fact.step}: {fact.get('what')} is {fact.get('value', 'non-finite')}; the mean divides by a count of 0", "nonfinite", 0.0, 0.0, 1),))
            return
        root = op.startswith(("Rsqrt", "Reciprocal", "Pow"))
        yield Finding(
            "division-by-zero", nonfinite.sure(fact), nonfinite.severity(window),
            f"Division by zero: {o.get('zeros') or o.get('nonfinite') or 'some'} of {o.get('numel', 'the')} "
            f"{'results' if root and not o.get('zeros') else 'divisor elements'}",
            "Add eps inside, before the root or power: rsqrt(var + 1e-5) in float32." if root else
            "Add a smoothing constant to the denominator in float32 (and to the numerator where 0/0 should be 1), or clamp a count at 1.",
            Where.at(nonfinite.place(window, fact), module=fact.get("module")), first_step=fact.step, last_step=fact.step, evidence=(nonfinite.evidence(fact),))
        return
    late = nonfinite.unseen(window)
    if late is not None and late[0] in ("Div", "Rsqrt", "Reciprocal"):
        yield nonfinite.suspected("division-by-zero", late, window, "Add a smoothing constant to the denominator, or clamp it.")
