from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.script import around, calls

CURES = {
    "sqrt": "Put eps inside the root: sqrt(x + 1e-12) in float32; its derivative at 0 is infinite.",
    "norm": "Put eps inside the norm: (x.pow(2).sum(-1) + 1e-12).sqrt(); its derivative at 0 is undefined.",
    "std": "Add eps to the variance before the root; the derivative of std at 0 is undefined.",
    "pow": "Clamp the base away from 0 before a power below 1.",
    "log": "Clamp the argument before the log; a where() afterwards does not stop its gradient.",
    "division": "Make the denominator safe before dividing; a where() afterwards does not stop its gradient.",
    "domain": "Clamp the argument inside (-1, 1), e.g. to 1 - 1e-6: the derivative of this function is infinite at the edge.",
    "exp": "Clamp the argument of exp (at 80 in float32) before, not its result after.",
}
KINDS = frozenset(("sqrt-of-zero", "norm-of-zero", "std-of-zero", "log-of-zero", "log-of-negative", "pow-of-zero", "division-by-zero", "domain-edge",
                   "domain-error", "exp-overflow", "sqrt", "pow"))


@rule("singular-gradient", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """The loss is finite but its derivative is not.

    **What it is.** A function with an infinite or undefined derivative at the value it was given: the square root or norm of
    0, a power below 1 of 0, acos at 1; or a branch of `torch.where` that is not taken but whose gradient, 0 times
    infinity, is NaN.

    **How it is seen.** The loss was finite and its gradients were not, before the step. The operation is the one whose saved
    operand sits on the singular point.

    **Why it matters.** The forward pass looks healthy, so the cause is sought elsewhere, while one step makes all weights NaN.

    **What to do.** Make the argument safe *before* the operation (eps inside the root, clamp before the log). A `where` after
    it does not help: clamp in the branch that is not taken too.

    **When this is wrong.** Scaled float16 gradients overflow now and then; a GradScaler skips those steps, and this rule
    ignores them.

    **Source.** Handbook A §23; pytorch issue 68425.
    """
    for fact in nonfinite.facts(window):
        if fact.get("what") != "gradient" or fact.get("op_kind") not in KINDS or fact.get("before_step") is False:
            continue
        if nonfinite.first(window, *nonfinite.FORWARD) is not None and nonfinite.facts(window)[0] is not fact \
                and nonfinite.facts(window)[0].get("what") in nonfinite.FORWARD:
            continue
        kind = str(fact.get("op_kind"))
        branch = fact.at is not None and any(True for s in around(window, fact.at)[-1:] for _ in calls(s, "where"))
        op = str(fact.get("op") or kind)
        family = next((k for k in CURES if k in kind or k in op.lower()), "domain")
        yield Finding(
            "singular-gradient", nonfinite.sure(fact), nonfinite.severity(window),
            f"Finite loss, non-finite gradient: {kind.replace('-', ' ')} in {op.removesuffix('Backward0')}"
            + (", in a branch of where() that is not taken" if branch else ""),
            CURES[family] if not branch else "Clamp the argument before this operation, also for the branch of where() that is not taken.",
            Where.at(fact.at, module=fact.get("module")), first_step=fact.step, last_step=fact.step, evidence=(nonfinite.evidence(fact),))
        return
    late = nonfinite.unseen(window)
    if late is not None and late[0] in ("Acos", "Asin", "Atanh", "Sqrt", "Pow"):
        family = {"Sqrt": "sqrt", "Pow": "pow"}.get(late[0], "domain")
        yield nonfinite.suspected("singular-gradient", late, window, CURES[family])
