from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import dotted, nodes, quoted, spot
from osler.rules.graph_questions import parameters, shown


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
        if float(fact.get("share") or 0.0) >= least_share and everywhere(window, [str(n) for n in fact.get("names") or ()]):
            yield overwritten(window, fact)
            return
    for fact in window.facts("state-unused"):
        if window.n_steps:
            yield Finding(
                "weights-not-loaded", "certain", "harmful" if before_training(window, fact.at) else "note", f"a checkpoint that fits {fact.get('class')} is read and never applied",
                f"Call load_state_dict with what {quoted(window, fact.at, 'torch.load')} returns.", Where.at(fact.at), first_step=fact.get("first_step", fact.step),
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
            f"{cure} and load with strict=True at {quoted(window, fact.at, 'this line')}.", Where.at(fact.at, module=fact.get("class")), first_step=fact.get("first_step", fact.step),
            evidence=(Evidence(f"{matched} of {expected} keys ({share:.0%} of the weights) matched; missing: {shown(map(str, fact.get('missing') or ()))}; given but unknown: "
                               f"{shown(map(str, fact.get('unexpected') or ()))}", "load-state-dict", value=share, threshold=least_share, samples=expected),),
            explains=("loss-plateau", "frozen-params"))
    return None


def before_training(window: Window, at: Location | None) -> bool:
    """The line stands before the training loop's step (a checkpoint read back at the end is a check)."""
    counts = window.last("cycle")
    rows = counts.get("optimizers") or () if counts is not None else ()
    steps = [p for r in rows if (p := spot((r.get("last_lines") or {}).get("step"))) is not None]
    return at is not None and not any(p.file == at.file and p.line < at.line and p.function == at.function for p in steps)


def everywhere(window: Window, names: list[str]) -> bool:
    """Every layer that has weights lost some: a new head alone is transfer learning."""
    layers = {p["name"].rpartition(".")[0] for p in parameters(window).values() if p.get("loaded") and len(p.get("shape") or ()) > 1}
    return layers <= {n.rpartition(".")[0] for n in names}


def initialised_at(window: Window) -> Location | None:
    """The first call after the last load that initialises: apply(init), reset_parameters, nn.init."""
    loads = [f.at for f in window.facts("load-state-dict") if f.at is not None]

    def initialises(node: ast.AST) -> bool:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        return name.split(".")[-1] in ("apply", "reset_parameters") or "init" in name.split(".")[-1].lower().replace("__init__", "")

    after = [at for at, _ in nodes(window, initialises) if loads and at.file == loads[-1].file and at.line > loads[-1].line]
    return after[0] if after else None


def overwritten(window: Window, fact: Fact) -> Finding:
    names = [str(n) for n in fact.get("names") or ()]
    place = fact.at or initialised_at(window)
    return Finding(
        "weights-not-loaded", "certain", "harmful", f"loaded weights are overwritten before training: {shown(names)}",
        f"Load after initialising, not before {quoted(window, place, 'the initialisation')}.", Where.at(place), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"{float(fact.get('share') or 0.0):.0%} of the loaded values differ at the first step, and no optimizer had touched them", "loaded-then-changed",
                           value=float(fact.get("share") or 0.0), threshold=0.5, samples=len(names)),), explains=("loss-plateau",))
