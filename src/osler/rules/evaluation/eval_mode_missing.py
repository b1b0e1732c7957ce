from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import modules
from osler.rules.loaders import SAYS_VALIDATION
from osler.rules.script import (
    FUNCTIONS,
    LOOPS,
    calls,
    evaluation_block,
    place,
    repeats_same_input,
    training_functions,
    trains,
    tree,
    words,
)

JUDGES = re.compile(r"(^|_)(acc\w*|correct|hits?|loss\w*|criterion|mse|rmse|mae|err\w*|auc|auroc|f1|nll|bce|iou|dice|bleu|perplexity|ppl|metric\w*|cross_entropy|ndcg|recall|"
                    r"precision|score\w*|val|valid\w*|vl|va|test\w*|eval\w*|confusion\w*|argmax|topk|eq)(_|$|\d)", re.I)
CLEARLY = re.compile(r"(^|_)(acc|accuracy|correct|hits?|(val|valid|test|eval)\w*|v?loss_?fn|criterion)(_|$)", re.I)


@rule("eval-mode-missing", "evaluation")
def check(window: Window, *, min_dropout: float = 0.02) -> Iterator[Finding]:
    """Validation runs with the model in train mode.

    **What it is.** The model is evaluated while its dropout is active or its batch norm uses the statistics of the
    validation batch: `model.eval()` was never called, or train mode was on again.

    **How it is seen.** In a stretch without gradients between steps a trained model ran forward with its training flag on,
    and at least one module in it behaves differently then (dropout with p of `min_dropout` or more, batch norm with running
    statistics). The stretch must judge something: a loss is computed in it, or the code around it compares predictions.

    **Why it matters.** The figures say little about the model: predictions are noisy and depend on which rows share a batch,
    and batch norm also absorbs validation rows into its running statistics.

    **What to do.** Call `model.eval()` before the validation loop and `model.train()` before training goes on.

    **When this is wrong.** Monte-Carlo dropout (several passes over one input are recognised), re-estimation of batch-norm
    statistics (a forward pass whose result is dropped), samples drawn from a generator, pseudo labels made at every step.
    Those stay silent; a model without dropout and batch norm does too, because the mode changes nothing.

    **Source.** Handbook A §27; pytorch-3dunet issue 53.
    """
    known = modules(window)
    dropout_p = {str(m.get("name")): m.get("attrs", {}).get("p") for m in known.values() if isinstance(m.get("attrs"), dict)}
    untracked = {str(m.get("name")) for m in known.values()
                 if isinstance(m.get("attrs"), dict) and m["attrs"].get("track_running_stats") is False}
    groups: dict[tuple[str, int], list[Seen]] = {}
    for phase in window.facts("phase"):
        for row in phase.get("roots") or ():
            at = place(row.get("at")) or phase.at
            dropout, batchnorm = active(row, dropout_p, untracked, min_dropout)
            if (dropout or batchnorm) and at is not None and judged(window, phase, row, at):
                groups.setdefault((at.file, at.line), []).append(Seen(phase, at, int(row.get("forwards") or 0), dropout, batchnorm))
    if not groups:
        yield from without_no_grad(window, known, min_dropout)
    for seen in groups.values():
        phase, dropout, batchnorm = seen[-1].phase, seen[-1].dropout, seen[-1].batchnorm
        forwards = sum(s.forwards for s in seen)
        what = " and ".join(filter(None, (f"{len(dropout)} dropout layer{'s' * (len(dropout) != 1)}" if dropout else "",
                                          f"{len(batchnorm)} batch-norm layer{'s' * (len(batchnorm) != 1)}" if batchnorm else "")))
        names = ", ".join([*batchnorm, *dropout][:4])
        at = head(window, seen[-1].at)
        called = any(m.get("training") is False for m in window.facts("mode-call"))
        yield Finding(
            "eval-mode-missing", "certain", "harmful", f"Validation runs in train mode: {what} stay active",
            f"Call model.eval() before this evaluation{'' if not called else ' too'}, and model.train() before the next training step.",
            Where.at(at, module=(batchnorm or dropout)[0] or None, also=(str(seen[-1].at),) if str(seen[-1].at) != str(at) else ()),
            first_step=min(s.phase.get("first_step", s.phase.step) for s in seen), last_step=phase.step,
            evidence=(Evidence(f"in {len(seen)} evaluation{'s' * (len(seen) != 1)} ({forwards} forward passes) the training flag was on; "
                               f"active: {names}", "phase", float(len(seen)), 0.0, forwards),),
            treatment="eval-mode")


@dataclass(frozen=True, slots=True)
class Seen:
    """One root that acted as in training during one stretch."""

    phase: Fact
    at: Location
    forwards: int
    dropout: list[str]
    batchnorm: list[str]


def active(row: dict[str, Any], dropout_p: dict[str, Any], untracked: set[str], least: float) -> tuple[list[str], list[str]]:
    """Names of the dropout and batch-norm modules that acted as in training, if this root was in train mode."""
    if not row.get("training"):
        return [], []
    p = {name: dropout_p.get(name) for name in row.get("dropout_active") or ()}
    return ([str(n) for n, v in p.items() if not isinstance(v, int | float) or v >= least],
            [str(n) for n in row.get("batchnorm_training") or () if n not in untracked])


def judged(window: Window, phase: Fact, row: dict[str, Any], at: Location) -> bool:
    """Whether this stretch evaluates the model, as opposed to sampling from it, labelling with it or warming it up."""
    if not phase.get("first_step", phase.step):
        return False
    averaged = row.get("class") == "AveragedModel" and "update_bn(" in window.sources.get(at.file, "")
    if averaged or "update_bn" in window.line(at.file, at.line) or "swa_utils" in (phase.lib or "") or repeats_same_input(window, at):
        return False
    block = evaluation_block(window, at)
    if block is None:
        return phase.get("kind") == "validation" and bool(phase.get("criterion_calls"))
    if result_dropped(block, at):
        return False
    said = words(block)
    if phase.get("kind") != "validation":
        return bool(phase.get("criterion_calls")) and any(CLEARLY.search(w) for w in said)
    return bool(phase.get("criterion_calls")) or any(JUDGES.search(w) for w in said)


def result_dropped(block: ast.AST, at: Location) -> bool:
    """The forward pass is a statement of its own: only its side effect on running statistics is wanted."""
    return any(
        isinstance(n, ast.Expr) and n.lineno <= at.line <= (n.end_lineno or n.lineno) and next(calls(n), None) is n.value
        and not isinstance(getattr(n.value, "func", None), ast.Attribute) for n in ast.walk(block))


def head(window: Window, at: Location) -> Location:
    """The line at which ``model.eval()`` belongs: head of the evaluation function, ``with`` or loop."""
    block = evaluation_block(window, at)
    return at if block is None else Location(at.file, block.lineno, block.name if isinstance(block, FUNCTIONS) else at.function)


def without_no_grad(window: Window, known: dict[int, dict[str, Any]], least: float) -> Iterator[Finding]:
    """Evaluation with gradients on looks like training to a watcher; here the losses that no backward used and the text tell."""
    counts = window.last("cycle")
    unused = int(counts.get("losses_without_backward") or 0) if counts is not None else 0
    if not unused or any(m.get("training") is False for m in window.facts("mode-call")):
        return
    noisy = [m for m in known.values() if m.get("training") and isinstance(m.get("attrs"), dict)
             and (("Dropout" in str(m.get("class")) and (m["attrs"].get("p") or 0) >= least)
                  or ("BatchNorm" in str(m.get("class")) and m["attrs"].get("track_running_stats") is not False))]
    for file, block in judging_blocks(window) if noisy else ():
        names = ", ".join(str(m.get("name")) for m in noisy[:4])
        yield Finding(
            "eval-mode-missing", "certain", "harmful", f"eval() is never called: {len(noisy)} layers act as in training while the model is judged",
            "Call model.eval() before this evaluation and model.train() after it (and wrap it in torch.no_grad()).",
            Where.at(Location(file, block.lineno), module=str(noisy[0].get("name"))),
            evidence=(Evidence(f"{unused} losses were computed that no backward used, and no call of eval() in the run; active: {names}",
                               "cycle", float(unused), 0.0, unused),), treatment="eval-mode")
        return


def judging_blocks(window: Window) -> Iterator[tuple[str, ast.stmt]]:
    """Functions named after an evaluation and loops over a validation loader that train nothing and judge something."""
    for file in dict.fromkeys(f.at.file for f in window.all_facts if f.at is not None):
        module, training = tree(window, file), training_functions(window, file)
        blocks = [n for n in ast.walk(module) if isinstance(n, (*FUNCTIONS, *LOOPS))] if module is not None else []
        for block in sorted(blocks, key=lambda b: b.lineno):
            named = re.search("eval|valid|test|accuracy|score", block.name, re.I) if isinstance(block, FUNCTIONS) else \
                isinstance(block, ast.For) and any(SAYS_VALIDATION.search(w) for w in words(block.iter))
            calls_model = len(list(calls(block))) > 1
            if named and calls_model and not trains(block, training) and any(JUDGES.search(w) for s in block.body for w in words(s)):
                yield file, block
