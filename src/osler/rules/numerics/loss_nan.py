from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite

ADVICE = {
    "exp-overflow": "Clamp the argument of exp (at 80 in float32, 11 in float16), or use logsumexp.",
    "softmax-of-masked-row": "Do not mask a whole row to minus infinity before a softmax: use a large negative number or skip the row.",
    "sqrt-of-negative": "Keep the argument of the square root non-negative: clamp(min=0) plus eps.",
    "pow-of-negative": "Keep the base of a fractional power positive.",
    "domain-error": "Clamp the argument to the domain of this function.",
}


@rule("loss-nan", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """The loss, a gradient or the weights became NaN or infinite.

    **What it is.** A symptom: a non-finite value appeared in training. What made it may be another finding, which then
    explains this one.

    **How it is seen.** The check at each backward found it. Where the graph tells which operation made it, that is said.

    **Why it matters.** After one step with such gradients all weights are NaN.

    **What to do.** Follow the finding that explains this one; without one, run again with `osler run --locate`.

    **When this is wrong.** Float16 gradients that a GradScaler skips are not counted.

    **Source.** Handbook A §23.
    """
    seen = [f for f in nonfinite.facts(window) if f.get("what") in nonfinite.SPREAD]
    if not seen:
        return
    fact = seen[0]
    kind = str(fact.get("op_kind") or "unknown")
    rise = nonfinite.growing(fact, window)
    gone = nonfinite.lost(window)
    made = f" in {str(fact.get('op')).removesuffix('Backward0')}" if fact.get("op") else ""
    evidence = [nonfinite.evidence(fact)]
    if rise is not None:
        evidence.append(Evidence(f"before that the loss rose to {rise:.3g} times its start", "steps/loss", rise, 10.0, len(window.steps)))
    yield Finding(
        "loss-nan", "certain", "fatal" if gone else "harmful",
        f"{str(fact.get('what')).capitalize()} became {fact.get('value', 'non-finite')} at step {fact.step}{made}",
        ADVICE.get(kind, "Follow the finding that explains this; else run again with --locate to name the operation."),
        Where.at(fact.at, module=fact.get("module")), first_step=fact.step, last_step=seen[-1].step, evidence=tuple(evidence))
