from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import modules
from osler.rules.script import FUNCTIONS, calls, evaluation_block, repeats_same_input, words

JUDGES = re.compile(r"(^|_)(acc\w*|correct|hits?|loss\w*|criterion|mse|rmse|mae|err\w*|auc|auroc|f1|nll|bce|iou|dice|bleu|perplexity|ppl|metric\w*|ndcg|recall|"
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
    groups: dict[tuple[str, int], list[tuple[Fact, list[str], list[str]]]] = {}
    for phase in window.facts("phase"):
        dropout, batchnorm = active(phase, dropout_p, untracked, min_dropout)
        if (dropout or batchnorm) and phase.at is not None and judged(window, phase):
            groups.setdefault((phase.at.file, phase.at.line), []).append((phase, dropout, batchnorm))
    for seen in groups.values():
        phase, dropout, batchnorm = seen[-1]
        forwards = sum(sum(int(r.get("forwards") or 0) for r in p.get("roots") or () if r.get("training")) for p, _, _ in seen)
        what = " and ".join(filter(None, (f"{len(dropout)} dropout layer{'s' * (len(dropout) != 1)}" if dropout else "",
                                          f"{len(batchnorm)} batch-norm layer{'s' * (len(batchnorm) != 1)}" if batchnorm else "")))
        names = ", ".join([*batchnorm, *dropout][:4])
        at = head(window, phase)
        called = any(m.get("training") is False for m in window.facts("mode-call"))
        yield Finding(
            "eval-mode-missing", "certain", "harmful", f"Validation runs in train mode: {what} stay active",
            f"Call model.eval() before this evaluation{'' if not called else ' too'}, and model.train() before the next training step.",
            Where.at(at, module=(batchnorm or dropout)[0] or None, also=(str(phase.at),) if str(phase.at) != str(at) else ()),
            first_step=min(p.get("first_step", p.step) for p, _, _ in seen), last_step=phase.step,
            evidence=(Evidence(f"in {len(seen)} evaluation{'s' * (len(seen) != 1)} ({forwards} forward passes) the training flag was on; "
                               f"active: {names}", "phase", float(len(seen)), 0.0, forwards),),
            treatment="eval-mode")


def active(phase: Fact, dropout_p: dict[str, object], untracked: set[str], least: float) -> tuple[list[str], list[str]]:
    """Names of the dropout and batch-norm modules that acted as in training, over the roots in train mode."""
    dropout: list[str] = []
    batchnorm: list[str] = []
    for r in phase.get("roots") or ():
        if r.get("training"):
            for name in r.get("dropout_active") or ():
                p = dropout_p.get(name)
                if not isinstance(p, int | float) or p >= least:
                    dropout.append(str(name))
            batchnorm += [str(n) for n in r.get("batchnorm_training") or () if n not in untracked]
    return dropout, batchnorm


def judged(window: Window, phase: Fact) -> bool:
    """Whether this stretch evaluates the model, as opposed to sampling from it, labelling with it or warming it up."""
    at = phase.at
    if at is None or not phase.get("first_step", phase.step):
        return False
    if "update_bn" in window.line(at.file, at.line) or "swa_utils" in (phase.lib or "") or repeats_same_input(window, at):
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


def head(window: Window, phase: Fact) -> Location | None:
    """The line at which ``model.eval()`` belongs: head of the evaluation function, ``with`` or loop."""
    if phase.at is None:
        return None
    block = evaluation_block(window, phase.at)
    if block is None:
        return phase.at
    return Location(phase.at.file, block.lineno, block.name if isinstance(block, FUNCTIONS) else phase.at.function)
