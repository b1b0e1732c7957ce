from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.graph_questions import shown


@rule("weights-not-loaded", "wiring")
def check(window: Window, *, least_share: float = 0.5) -> Iterator[Finding]:
    """A checkpoint is silently not applied.

    What it is: load_state_dict(strict=False) matches (nearly) no key because of a prefix; loaded values are overwritten by an
    initialisation afterwards; a checkpoint is read and never given to the model.
    How it is seen: what each load_state_dict call matched, of what was expected (less than `least_share` of the weights, with keys left
    over on both sides); values that differ from the loaded ones before any optimizer touched them; mappings that torch.load returned.
    Why it matters: fine-tuning starts from random weights.
    What to do: strip the prefix and load with strict=True; initialise before loading.
    When this is wrong: loading a trunk and leaving a new head out is transfer learning: most weights match, or the checkpoint has no key
    left over.
    Source: torch examples issue 1029.
    """
    latest = {(int(f.get("root", -1)), str(f.at)): f for f in window.facts("load-state-dict")}
    for fact in latest.values():
        found = told(window, fact, least_share)
        if found is not None:
            yield found
            return
    for fact in window.facts("loaded-then-changed"):
        if float(fact.get("share") or 0.0) >= least_share:
            yield overwritten(window, fact)
            return
    for fact in window.facts("state-unused"):
        if fact.step < window.n_steps:
            yield Finding(
                "weights-not-loaded", "certain", "harmful" if window.final else "note", f"a checkpoint that fits {fact.get('class')} is read and never applied",
                f"Call load_state_dict with what {quoted(window, fact.at, 'torch.load')} returns.", Where.at(fact.at), first_step=fact.step,
                evidence=(Evidence(f"torch.load returned {fact.get('keys')} entries that match {fact.get('class')}; no load_state_dict used them", "state-unused", value=0.0, threshold=1.0, samples=1),))
            return


def prefix(fact: Fact) -> str:
    """What stands before the expected names in the given ones (or the other way round)."""
    missing, unexpected = [str(k) for k in fact.get("missing") or ()], [str(k) for k in fact.get("unexpected") or ()]
    for given in unexpected:
        for wanted in missing:
            if given != wanted and given.endswith("." + wanted):
                return given.removesuffix(wanted)
            if given != wanted and wanted.endswith("." + given):
                return wanted.removesuffix(given)
    return ""


def told(window: Window, fact: Fact, least_share: float) -> Finding | None:
    matched, expected = int(fact.get("matched") or 0), int(fact.get("expected") or 0)
    share = float(fact.get("matched_numel") or 0) / max(float(fact.get("expected_numel") or 0), 1.0)
    left, lacking = int(fact.get("unexpected_total") or len(fact.get("unexpected") or ())), int(fact.get("missing_total") or len(fact.get("missing") or ()))
    if expected == 0 or lacking == 0 or (matched and (share >= least_share or not left)) or (fact.get("strict") and not matched and not left):
        return None
    if not fact.get("strict", True) or matched == 0:
        before = prefix(fact)
        none = matched == 0
        if not none and not before:
            severity = "note"
        else:
            severity = "harmful"
        cure = f"Strip (or add) the prefix {before!r} of the keys" if before else "Compare the checkpoint's keys with model.state_dict()"
        return Finding(
            "weights-not-loaded", "certain", severity, f"load_state_dict matched {matched} of {expected} entries of {fact.get('class')}: the weights stay as they were",
            f"{cure} and load with strict=True at {quoted(window, fact.at, 'this line')}.", Where.at(fact.at, module=fact.get("class")), first_step=fact.step,
            evidence=(Evidence(f"{matched} of {expected} keys ({share:.0%} of the weights) matched; missing: {shown(map(str, fact.get('missing') or ()))}; given but unknown: "
                               f"{shown(map(str, fact.get('unexpected') or ()))}", "load-state-dict", value=share, threshold=least_share, samples=expected),),
            explains=("loss-plateau", "frozen-params"))
    return None


def overwritten(window: Window, fact: Fact) -> Finding:
    names = [str(n) for n in fact.get("names") or ()]
    return Finding(
        "weights-not-loaded", "certain", "harmful", f"loaded weights are overwritten before training: {shown(names)}",
        f"Initialise before loading, not after {quoted(window, fact.at, 'load_state_dict')}.", Where.at(fact.at), first_step=fact.step,
        evidence=(Evidence(f"{float(fact.get('share') or 0.0):.0%} of the loaded values differ at the first step, and no optimizer had touched them", "loaded-then-changed",
                           value=float(fact.get("share") or 0.0), threshold=0.5, samples=len(names)),), explains=("loss-plateau",))
