from __future__ import annotations

import re
from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite

SMALLEST_HALF = 6e-8


@rule("log-of-zero", "numerics")
def check(window: Window) -> Iterator[Finding]:
    """The logarithm of zero in the forward pass.

    **What it is.** A probability that underflowed to exactly 0 (or a negative number) enters a logarithm: the loss is
    infinite or NaN, and after the step so is every weight.

    **How it is seen.** At the first non-finite loss the graph of that loss is read before it is freed: the operand saved by
    the log holds exact zeros or negative values while everything before it is finite. The operand is the proof. Where no gradient
    passes (a log inside the model of its own inputs), the batch was finite and the recorded program has a log on the way.

    **Why it matters.** One such element ends the run.

    **What to do.** Work with logits: `log_softmax`, `logsigmoid`, `cross_entropy`, `binary_cross_entropy_with_logits`. Where
    a probability is needed, clamp it at the spacing of its type (`torch.finfo(p.dtype).eps`); 1e-8 is 0 in float16.

    **When this is wrong.** Non-finite values made by earlier steps that already spoiled the weights are left to other rules.

    **Source.** Handbook A §23; pytorch issue 1620.
    """
    for fact in nonfinite.facts(window):
        made = nonfinite.on_the_way(window, fact)
        if made is not None and made.name in nonfinite.LOGARITHMS:
            o = nonfinite.operand(fact)
            yield Finding(
                "log-of-zero", "measured", nonfinite.severity(window),
                f"log of zero or of a negative number: {o.get('nonfinite')} of {o.get('numel', 'the')} values made from a finite batch are not finite",
                "Use log1p for counts, or clamp the argument above 0 first.",
                Where.at(made.at, also=(str(fact.at),) if fact.at is not None and fact.at != made.at else ()), first_step=fact.step, last_step=fact.step,
                evidence=(Evidence(f"step {fact.step}: the batch was finite, {made.name} lies on its way to {str(fact.get('op')).removesuffix('Backward0')}, whose operand "
                                   "is not finite; weights were still finite", "nonfinite", nonfinite.number(o.get("nonfinite")), 0.0, int(nonfinite.number(o.get("numel")) or 1)),))
            return
        if fact.get("op_kind") not in ("log-of-zero", "log-of-negative") or fact.get("what") not in nonfinite.FORWARD:
            continue
        o = nonfinite.operand(fact)
        negative = fact.get("op_kind") == "log-of-negative" or (nonfinite.number(o.get("min")) or 0) < 0
        at = nonfinite.place(window, fact)
        line = window.line(at.file, at.line) if at is not None else ""
        eps = re.search(r"(?<![\w.])1e-(\d+)", line)
        half = o.get("dtype") == "float16"
        hint = f" The constant {eps[0]} on this line is 0 in float16." if eps and half and float(eps[0]) < SMALLEST_HALF else ""
        yield Finding(
            "log-of-zero", nonfinite.sure(fact), nonfinite.severity(window),
            f"log of {'a negative number' if negative else 'zero'}: {o.get('negative') if negative and o.get('negative') else o.get('zeros') or 'some'} "
            f"of {o.get('numel', 'the')} operand elements",
            ("Keep the argument positive: clamp it, or parametrise it with softplus or exp." if negative else
             "Use log_softmax/logsigmoid or a loss that takes logits; else clamp the probability at torch.finfo(p.dtype).eps first.") + hint,
            Where.at(at, module=fact.get("module")), first_step=fact.step, last_step=fact.step,
            evidence=(nonfinite.evidence(fact),), treatment=None if negative else "logits")
        return
    late = nonfinite.unseen(window)
    if late is not None and late[0] in ("Log", "Log2", "Log10"):
        yield nonfinite.suspected("log-of-zero", late, window, "Use log_softmax, logsigmoid or a loss that takes logits; else clamp the argument first.")
