from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.script import place


@rule("infeasible-target", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """The loss is infinite for some targets.

    **What it is.** A target that the outputs cannot produce: in CTC an input that is shorter than its label sequence (with a
    blank between repeated labels), in cross entropy a target class whose score is masked to minus infinity.

    **How it is seen.** The first non-finite loss comes out of the CTC operation itself, or of a likelihood whose operand
    holds minus infinity at the target.

    **Why it matters.** The mean over the batch is infinite and its gradient NaN, because of rows that could have been skipped.

    **What to do.** Drop or lengthen such rows (input length ≥ target length + repeated labels) or pass `zero_infinity=True`; keep the
    target's class out of the mask.

    **When this is wrong.** `zero_infinity=True` hides the infinity; the rows still teach nothing. Scores that overflow in a run that blows up
    are infinite too: where the loss rose thirtyfold before, nothing is said.

    **Source.** PyTorch documentation of CTCLoss; pytorch issue 49046.
    """
    criteria = window.facts("criterion")
    ctc = next((c for c in reversed(criteria) if "ctc" in str(c.get("function")).lower()), None)
    for fact in nonfinite.facts(window):
        op = str(fact.get("op") or "")
        o = nonfinite.operand(fact)
        sequence = op.lower().startswith(("ctc", "cudnnctc")) or (ctc is not None and fact.get("what") in nonfinite.FORWARD
                                                                 and fact.get("op_kind") in (None, "unknown") and fact is nonfinite.facts(window)[0])
        masked = op.startswith(("NllLoss", "CrossEntropy")) and fact.get("value") == "inf" and \
            (nonfinite.number(o.get("min")) == float("-inf") or (bool(o.get("nonfinite")) and not o.get("nan"))) and \
            nonfinite.growing(fact, window, 30.0) is None
        if not (sequence or masked) or fact.get("before_step") is False:
            continue
        built = place(ctc.get("built_at")) if sequence and ctc is not None else None
        at = built or (ctc.at if sequence and ctc is not None and fact.at is None else fact.at)
        values = window.calls["value"]
        bad = int((~np.isfinite(values)).sum())
        yield Finding(
            "infeasible-target", "certain" if op and (sequence or masked) else "measured", nonfinite.severity(window),
            "CTC loss is infinite: a target needs more steps than its input has" if sequence else
            "Cross entropy is infinite: the target's class is masked to minus infinity",
            "Drop rows with input length < target length + repeats, or set zero_infinity=True." if sequence else
            "Do not mask the class that is the target (or use a large negative number).",
            Where.at(at, module=fact.get("module"), also=(str(fact.at),) if fact.at is not None and fact.at != at else ()),
            first_step=fact.step, last_step=fact.step,
            evidence=(nonfinite.evidence(fact), *((Evidence(f"{bad} of {len(values)} recorded loss values are not finite", "calls", float(bad), 0.0,
                                                            len(values)),) if bad else ())))
        return
