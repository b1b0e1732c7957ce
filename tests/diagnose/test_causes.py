"""Folding: symptoms under causes, two faults side by side, circles opened always in the same way."""

from __future__ import annotations

import itertools

import pytest

from osler.core.finding import Finding, Where
from osler.diagnose.causes import fold, reason


def finding(cause: str, certainty: str = "certain", severity: str = "harmful", first: int | None = None, last: int | None = None,
            explains: tuple[str, ...] = ()) -> Finding:
    return Finding(cause, certainty, severity, cause, "", Where("train.py", 3), first, last, explains=explains)


def parents(*findings: Finding) -> dict[str, str | None]:
    return {f.cause: f.explained_by for f in fold(findings)}


@pytest.mark.parametrize(("cause", "effect"), [
    ("log-of-zero", "loss-nan"), ("graph-broken", "unused-module"), ("graph-broken", "lr-too-low"), ("graph-broken", "loss-plateau"),
    ("optimizer-wrong-params", "vanishing-gradients"), ("unregistered-params", "optimizer-wrong-params"),
    ("frozen-params", "optimizer-wrong-params"), ("grad-not-cleared", "lr-too-high"), ("grad-not-cleared", "loss-diverged"),
    ("grad-not-cleared", "exploding-gradients"), ("nonfinite-input", "log-of-zero"), ("step-missing-or-rare", "lr-too-low"),
    ("double-activation", "vanishing-gradients"), ("double-activation", "lr-too-low"), ("drop-last-data-loss", "step-missing-or-rare"),
    ("wrong-dim", "loss-plateau"), ("lr-too-high", "dead-units"), ("lr-too-high", "loss-nan"), ("attention-mask", "loss-nan"),
])
def test_an_effect_is_folded_under_its_cause(cause: str, effect: str) -> None:
    statistic = {"lr-too-low", "lr-too-high", "vanishing-gradients", "exploding-gradients", "dead-units", "loss-plateau", "loss-diverged"}
    found = fold([finding(effect, "measured" if effect in statistic else "certain"), finding(cause)])
    assert found[0].explained_by == cause
    assert found[1].explains == (effect,)
    assert reason(cause, effect)


def test_chains_end_at_the_root() -> None:
    found = fold([finding("loss-plateau", "measured"), finding("vanishing-gradients", "measured"), finding("double-activation")])
    assert [f.explained_by for f in found] == ["double-activation", "double-activation", None]
    assert set(found[2].explains) == {"vanishing-gradients", "loss-plateau"}


def test_two_independent_faults_are_both_shown() -> None:
    found = parents(finding("grad-not-cleared"), finding("eval-mode-missing"), finding("double-activation"), finding("loss-diverged", "measured"))
    assert [c for c, by in found.items() if by is None] == ["grad-not-cleared", "eval-mode-missing", "double-activation"]


def test_a_certain_fact_is_not_folded_under_a_statistical_link() -> None:
    assert parents(finding("grad-not-cleared"), finding("loss-scale"))["loss-scale"] is None
    assert parents(finding("grad-not-cleared"), finding("loss-scale", "measured"))["loss-scale"] == "grad-not-cleared"


def test_a_weaker_claim_does_not_hide_a_stronger_one() -> None:
    assert parents(finding("lr-too-high", "suspected"), finding("dead-units", "measured"))["dead-units"] is None


def test_a_symptom_is_folded_under_any_claim_that_says_why() -> None:
    assert parents(finding("lr-too-high", "suspected"), finding("loss-nan", "certain", "fatal"))["loss-nan"] == "lr-too-high"


def test_a_note_does_not_hide_a_fault() -> None:
    assert parents(finding("label-noise", severity="note"), finding("loss-plateau", "measured"))["loss-plateau"] is None


def test_what_begins_after_the_end_of_the_other_did_not_cause_it() -> None:
    assert parents(finding("lr-too-high", "measured", first=200), finding("loss-spikes", "measured", first=10, last=90))["loss-spikes"] is None


def test_a_rule_may_name_its_own_effects() -> None:
    assert parents(finding("slow-dataset", explains=("metric-unequal-batches",)), finding("metric-unequal-batches"))["metric-unequal-batches"] == "slow-dataset"


@pytest.mark.parametrize("names", [
    ("hidden-state-not-detached", "loss-graph-retained", "python-memory-leak"),
    ("frozen-params", "optimizer-wrong-params", "unregistered-params", "unused-module", "params-not-moving"),
    ("lr-too-high", "exploding-gradients", "loss-diverged", "dead-units", "loss-nan"),
])
def test_circles_open_at_one_root_whatever_the_order(names: tuple[str, ...]) -> None:
    roots = set()
    for order in itertools.permutations(names):
        found = parents(*(finding(n, "measured") for n in order))
        roots.add(tuple(sorted(c for c, by in found.items() if by is None)))
    assert len(roots) == 1
    assert len(roots.pop()) == 1


def test_reasons_follow_the_chain() -> None:
    assert reason("double-activation", "params-not-moving")
    assert reason("no-workers", "loss-nan") is None
