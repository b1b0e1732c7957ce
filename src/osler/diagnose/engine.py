"""Runs every rule over a window and turns what they say into one verdict. Not here: the rules, and how a verdict looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from osler.core.finding import CERTAINTIES, SEVERITIES, Finding, NotChecked
from osler.core.rule import Rule
from osler.core.window import Window
from osler.diagnose import catalogue, causes
from osler.diagnose.config import Config
from osler.diagnose.rank import rank, strength
from osler.diagnose.suppress import Suppressions

STARTUP_STEPS = 8
"""Steps left out of the cost per step: they hold imports, first traces and experiments, which are start-up."""

FEW_STEPS = 20
"""Below this, no statement about a curve is worth its name."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, what was not looked at, what the user chose not to see, and what it cost.

    Attributes:
        findings: in the order of ranking, folded ones (``explained_by``) last.
        checked: causes whose rule ran and could judge.
    """

    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    suppressed: tuple[Finding, ...] = ()
    overhead: Mapping[str, Any] = field(default_factory=dict)
    checked: tuple[str, ...] = ()


def diagnose(window: Window, config: Config | None = None, rules: Sequence[Rule] | None = None) -> Verdict:
    """Every rule in isolation, then suppression, folding and ranking."""
    config = config or Config()
    raw: list[Finding] = []
    missing: list[NotChecked] = []
    checked: list[str] = []
    unselected = 0
    for rule in catalogue.RULES if rules is None else rules:
        chosen = config.selects(rule.cause)
        unselected += not chosen
        said = run(rule, window, config.options.get(rule.cause, {}))
        raw += [f for f in said if isinstance(f, Finding) and (chosen or f.cause in config.select)]
        silent = [n for n in said if isinstance(n, NotChecked)]
        if chosen:
            missing += silent
            if not silent:
                checked.append(rule.cause)
    if unselected:
        missing.append(NotChecked("select", f"{unselected} rules are not selected by the configuration"))
    suppressions = Suppressions(config, window.sources)
    missing += [*general(window), *suppressions.mistakes()]
    shown, hidden = suppressions.split(unique(raw))
    shown, hidden = drop_followers(shown, hidden)
    return Verdict(tuple(rank(shown)), tuple(dict.fromkeys(missing)), tuple(rank(hidden)), overhead(window), tuple(checked))


def run(rule: Rule, window: Window, options: Mapping[str, Any]) -> list[Finding | NotChecked]:
    """What one rule says; a rule that fails says that."""
    try:
        return rule(window, **options)
    except Exception as problem:  # a fault of one rule must not silence the others
        return [NotChecked(rule.cause, f"failed: {type(problem).__name__}: {problem}")]


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """One finding per key; and a weaker finding without a place joins a stronger one of the same cause that has one."""
    kept: dict[tuple[Any, ...], Finding] = {}
    for finding in sorted(findings, key=strength):
        key: tuple[Any, ...] = finding.key
        if finding.where.file is None and finding.where.module is None and finding.where.parameter is None:
            key = next((k for k, f in kept.items() if f.cause == finding.cause), key)
        kept[key] = join(kept[key], finding) if key in kept else finding
    return list(kept.values())


def join(first: Finding, second: Finding) -> Finding:
    """Two sightings of one finding: the strongest claim, the longest span, all evidence."""
    steps = [s for s in (first.first_step, second.first_step) if s is not None]
    ends = [s for s in (first.last_step, second.last_step) if s is not None]
    return first.replace(
        certainty=min(first.certainty, second.certainty, key=CERTAINTIES.index),
        severity=min(first.severity, second.severity, key=SEVERITIES.index),
        first_step=min(steps, default=None), last_step=max(ends, default=None),
        evidence=tuple(dict.fromkeys((*first.evidence, *second.evidence))))


def drop_followers(shown: Sequence[Finding], hidden: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Folds what is shown, and hides what only a hidden finding explains.

    Whoever suppresses a cause does not want to see its statistics either; certain or fatal findings stay.
    """
    shown, hidden = list(shown), list(hidden)
    while True:
        folded = causes.fold(shown)
        gone = [i for i, f in enumerate(folded) if f.explained_by is None and f.certainty != "certain" and f.severity != "fatal"
                and any(causes.may_explain(h, f) for h in hidden)]
        if not gone:
            return folded, hidden
        hidden += [shown[i] for i in gone]
        shown = [f for i, f in enumerate(shown) if i not in gone]


def general(window: Window) -> list[NotChecked]:
    """What no rule could see in this run, whatever it looks for."""
    rows = []
    if window.n_steps == 0:
        rows.append(NotChecked("curves", "no optimizer step was completed"))
    elif window.n_steps < FEW_STEPS:
        rows.append(NotChecked("curves", f"only {window.n_steps} steps were recorded; statistics need at least {FEW_STEPS}"))
    what = sorted({str(f.get("what", "a compiler")) for f in window.facts("compile")})
    if what:
        rows.append(NotChecked("compiled regions", f"the inside of what {', '.join(what)} compiled cannot be seen"))
    cut = [t for t in window.traces if t.truncated]
    if cut:
        rows.append(NotChecked("program traces", f"{len(cut)} of {len(window.traces)} were cut off at their limit of operations"))
    rows += [NotChecked("osler", str(f.get("text", ""))) for f in window.facts("self")
             if f.get("what") in ("guard", "disarmed", "experiment-failed", "trace-skipped") and f.get("text")]
    return rows


def overhead(window: Window) -> dict[str, Any]:
    """Share of the time from the third step to the last that osler itself took; ``None`` where it was not measured.

    Rows are thinned where steps are short, so the time base is the clock, not the sum of the recorded steps; a row's own time
    covers the steps left out before it.
    """
    steps = window.steps
    budget = window.run.get("budget")
    later, first = steps[STARTUP_STEPS:], steps[:STARTUP_STEPS]
    timed = later[np.isfinite(later["own_time"])]
    total = float(timed["t"][-1] - first["t"][-1]) if len(timed) else 0.0
    startup = [window.run.get("startup_s"), *(f.get("startup_s") for f in window.facts("self"))]
    known = [float(s) for s in startup if isinstance(s, int | float) and math.isfinite(s)]
    own = float(np.nansum(first["own_time"])) if len(first) else 0.0
    return {"fraction": float(timed["own_time"].sum()) / total if total > 0 else None,
            "budget": float(budget) if isinstance(budget, int | float) else None,
            "startup_s": (max(known) if known else 0.0) + own if known or len(first) else None,
            "steps": len(timed), "seconds": total}


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict over the ranks of a distributed run; what several ranks say is said once, at the lowest rank."""
    if len(verdicts) == 1:
        return verdicts[0]
    bare = [f.replace(explains=(), explained_by=None) for v in verdicts for f in v.findings]
    costs = [v.overhead for v in verdicts if v.overhead.get("fraction") is not None]
    return Verdict(tuple(rank(causes.fold(unique(bare)))),
                   tuple(dict.fromkeys(n for v in verdicts for n in v.not_checked)),
                   tuple(unique(f for v in verdicts for f in v.suppressed)),
                   max(costs, key=lambda c: float(c["fraction"]), default=verdicts[0].overhead if verdicts else {}),
                   tuple(dict.fromkeys(c for v in verdicts for c in v.checked)))
