from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.script import (
    around,
    below_function,
    calls,
    function_around,
    loop_heads,
    place,
    training_functions,
    trains,
)


@rule("train-mode-not-restored", "evaluation")
def check(window: Window, *, min_share: float = 0.05, min_steps: int = 3) -> Iterator[Finding]:
    """Training goes on in evaluation mode.

    **What it is.** `model.eval()` was called for validation and `model.train()` never undid it, so the steps that follow
    train with dropout off and batch-norm statistics frozen.

    **How it is seen.** The training flag of a model that is being optimized was on in one step and off in a later one, a
    module in it behaves differently then (dropout with p > 0, batch norm), and a validation lies between the two steps (or
    before the first one, if the `eval()` stands among validation passes that come again).
    At least `min_steps` steps and a share `min_share` of all steps are concerned.

    **Why it matters.** Regularisation silently stops after the first validation: training loss drops, validation gets worse.

    **What to do.** Call `model.train()` at the head of every training epoch (and after a validation inside an epoch).

    **When this is wrong.** A second stage that freezes batch norm on purpose: without a validation in between this is
    only a note.

    **Source.** Handbook A §27; vsepp issue 4.
    """
    total = max([window.n_steps, *(f.step for f in window.all_facts)])
    flips: dict[int, list[Fact]] = {}
    for fact in window.facts("train-mode"):
        flips.setdefault(fact.get("root"), []).append(fact)
    for facts in flips.values():
        off = [(f, (facts[i + 1].step if i + 1 < len(facts) else total)) for i, f in enumerate(facts)
               if f.get("training") is False and (f.get("dropout") or f.get("batchnorm")) and (was_on(facts, i) or validated_first(window, f))]
        steps = sum(max(0, end - f.step) for f, end in off)
        if not off or steps < min_steps or steps < min_share * max(total, 1):
            continue
        first = off[0][0]
        validated = validated_first(window, first) or any(p.get("kind") == "validation" and (not p.get("grad_enabled") or (p.get("forwards") or 0) > 1) and abs(p.step - first.step) <= 1 for p in window.facts("phase"))
        if not validated:
            block = function_around(around(window, place(first.get("set_at"))))
            validated = block is not None and not trains(block)
        set_at = place(first.get("set_at"))
        at = where(window, set_at) or first.at
        dropout, batchnorm = list(first.get("dropout") or ()), list(first.get("batchnorm") or ())
        what = " and ".join(filter(None, (f"dropout off in {len(dropout)} layers" if dropout else "",
                                          f"batch statistics frozen in {len(batchnorm)} layers" if batchnorm else "")))
        yield Finding(
            "train-mode-not-restored", "certain" if validated else "suspected", "harmful" if validated else "note",
            f"{steps} of {total} steps trained in evaluation mode: {what}",
            f"Call model.train() here, at the head of the training loop: the last call on it was eval() at {set_at or 'an unknown line'}.",
            Where.at(at, module=str((batchnorm or dropout)[0]) or None, also=(str(set_at),) if set_at else ()),
            first_step=first.step + 1, last_step=off[-1][1],
            evidence=(Evidence(f"training flag on until step {first.step}, off in {steps} of the {total} steps"
                               + (f"; eval() at {set_at}" if set_at else ""), "train-mode", float(steps), float(min_steps), total),),
            treatment="train-mode")


def was_on(facts: list[Fact], position: int) -> bool:
    """Whether the model had trained in train mode before this flip."""
    return facts[position].step > 0 or any(f.get("training") for f in facts[:position])


def validated_first(window: Window, flip: Fact) -> bool:
    """A validation before the first step set the flag: the ``eval()`` stands in a function that trains nothing and in which validation
    passes run, or in the training loop before such passes. (A model that is put into evaluation mode once, to be fine-tuned so, is no such.)"""
    at = place(flip.get("set_at"))
    counts = window.last("cycle")
    lines = [o.get("last_lines") or {} for o in (counts.get("optimizers") or ())] if counts is not None else []
    step = next((found for row in lines if (found := place(row.get("step") or row.get("backward"))) is not None), None)
    if at is None or step is None:
        return False
    function = function_around(around(window, at))
    blocks: list[ast.stmt] = [function] if function is not None and not trains(function, training_functions(window, at.file)) else \
        [loop for loop in loop_heads(window, at) if step.file == at.file and loop.lineno <= step.line <= (loop.end_lineno or 0)]
    passes = [p.at for p in window.facts("phase") if p.get("kind") == "validation" and p.get("grad_enabled") is False and p.at is not None and p.at.file == at.file]
    return any(at.line <= p.line and b.lineno <= p.line <= (b.end_lineno or 0) for b in blocks for p in passes)


def where(window: Window, set_at: Location | None) -> Location | None:
    """The line at which ``model.train()`` belongs: head of the body of the loop over epochs, or after a validation inside an epoch."""
    counts = window.last("cycle")
    lines = [o.get("last_lines") or {} for o in (counts.get("optimizers") or ())] if counts is not None else []
    step = next((found for row in lines if (found := place(row.get("step") or row.get("backward"))) is not None), None)
    if step is None:
        return set_at
    loops = loop_heads(window, step)
    if set_at is not None and set_at.file == step.file and loops and loops[-1].lineno <= set_at.line <= (loops[-1].end_lineno or 0):
        inner = [s for s in below_function(around(window, set_at)) if s.lineno > loops[-1].lineno and not trains(s)]
        return Location(set_at.file, (inner[0].end_lineno or inner[0].lineno) if inner else set_at.line)
    if len(loops) > 1:
        return Location(step.file, loops[-2].body[0].lineno)
    checked = function_around(around(window, set_at))
    if loops and checked is not None and not loops[0].lineno <= checked.lineno <= (loops[0].end_lineno or 0) \
            and any(True for _ in calls(loops[0], checked.name)) and not trains(checked, training_functions(window, set_at.file if set_at else "")):
        last = checked.body[-1]
        return Location(set_at.file if set_at else step.file, last.lineno, checked.name)
    function = function_around(around(window, step))
    if function is not None:
        return Location(step.file, function.body[0].lineno, function.name)
    return Location(step.file, loops[0].body[0].lineno) if loops else step
