from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.graph_questions import (
    Pass,
    copies,
    count,
    ever_optimized,
    hand_written,
    modules,
    numel,
    optimizers,
    parameters,
    passes,
    reached,
    shown,
    stale_optimizers,
)


@rule("optimizer-wrong-params", "wiring")
def check(window: Window, *, least_share: float = 0.0) -> Iterator[Finding]:
    """The optimizer holds stale, missing or foreign parameters.

    What it is: the model was rebuilt after the optimizer was made; layers were added later or left out of the parameter groups; a
    layer was unfrozen without telling the optimizer; or the optimizer of one network also steps its opponent.
    How it is seen: the parameters that the loss reaches in the autograd graph are compared with those that any optimizer ever held
    (more than `least_share` of all their elements missing).
    Why it matters: parameters in no optimizer never move, although their gradients are computed; an opponent stepped by both sides
    gives in.
    What to do: make the optimizer after the final model exists, over all parameters that shall learn and no others.
    When this is wrong: frozen, loaded or previously trained parameters, copies kept as targets or teachers, and parameters updated by
    hand are left out on purpose and not reported.
    Source: torch issues 54765 and 14467.
    """
    stale = stale_optimizers(window)
    missing = left_out(window)
    if stale and missing:
        yield told_stale(window, stale, missing)
    elif missing:
        total = sum(numel(parameters(window)[u]["shape"]) for u in reached(window) if u in parameters(window))
        if sum(numel(p["shape"]) for p in missing) > least_share * total:
            yield told_missing(window, missing)
    yield from opponents(window)


def left_out(window: Window) -> list[dict[str, Any]]:
    """Registered parameters that a loss reaches, that no optimizer ever held, and that nothing says were meant to stay."""
    known, held = parameters(window), ever_optimized(window)
    unregistered = {u for f in window.facts("unregistered") for u in f.get("uids") or ()}
    aside = hand_written(window) | unregistered
    foreign_roots = copies(window)
    was_frozen = {p["uid"] for f in window.facts("params") for p in f.get("params") or () if not p.get("requires_grad", True)}
    built = {(f.at.file, f.at.line) for f in window.facts("module-built-in-step") if f.at is not None and f.get("inside")}
    mods = modules(window)
    found = []
    for uid in sorted(reached(window) - held - aside):
        p = known.get(uid)
        if p is None or not p.get("requires_grad", True) or p.get("root", -1) in foreign_roots or p.get("stepped"):
            continue
        if p.get("loaded") and uid not in was_frozen:
            continue
        at = spot(mods.get(p["module"], {}).get("at"))
        if at is not None and (at.file, at.line) in built:
            continue
        found.append(p)
    return found


def maker(window: Window, indices: list[int]) -> Fact | None:
    known = optimizers(window)
    return next((known[i] for i in indices if i in known), None)


def told_stale(window: Window, stale: dict[int, set[int]], missing: list[dict[str, Any]]) -> Finding:
    fact = maker(window, sorted(stale))
    live = set(optimizers(window)) - set(stale)
    roots = {m["root"] for p in missing if (m := modules(window).get(p["module"]))}
    rebuilt = [at for r in roots if (at := spot(modules(window).get(r, {}).get("at"))) is not None]
    return Finding(
        "optimizer-wrong-params", "certain", "harmful" if live else "fatal", "the optimizer holds parameters of another model than the one that is trained",
        f"Make the optimizer ({quoted(window, fact.at if fact else None, 'its construction')}) after the model that is trained, over that model's parameters.",
        Where.at(fact.at if fact else None, also=tuple(str(a) for a in rebuilt[:2])), first_step=0,
        evidence=(Evidence(f"none of the optimizer's {count(sum(map(len, stale.values())), 'parameter')} is reached by the loss; {count(len(missing), 'parameter')} that the loss reaches "
                           f"({shown(p['name'] for p in missing)}) are in no optimizer", "graph", value=0.0, threshold=1.0, samples=len(missing)),),
        treatment="optimize-all-params", explains=("loss-plateau", "lr-too-low", "grad-not-cleared", "unused-module"))


def told_missing(window: Window, missing: list[dict[str, Any]]) -> Finding:
    known = optimizers(window)
    fact = known[max(known)] if known else None
    first = known[min(known)] if known else None
    served = [p for p in parameters(window).values() if p["uid"] in reached(window)]
    share = sum(numel(p["shape"]) for p in missing) / max(sum(numel(p["shape"]) for p in served), 1)
    fresh = any((p.get("init") or {}).get("default") for p in missing) or any(len(p["shape"]) > 1 for p in missing)
    only_embedding = all(modules(window).get(p["module"], {}).get("class") == "Embedding" and not (p.get("init") or {}).get("default") for p in missing)
    severity = "note" if only_embedding or not fresh else "harmful"
    if not known:
        severity = "note"
    place = fact.at if fact else None
    return Finding(
        "optimizer-wrong-params", "certain", severity, f"{count(len(missing), 'parameter')} that the loss reaches {'is' if len(missing) == 1 else 'are'} in no optimizer",
        f"Give {shown(p['name'] for p in missing)} to the optimizer at {quoted(window, place, 'its construction')}.",
        Where.at(place, parameter=missing[0]["name"], also=(str(first.at),) if first and first is not fact and first.at else ()), first_step=0,
        evidence=(Evidence(f"{shown((p['name'] for p in missing), 6)}: {share:.0%} of the trainable elements get gradients and never move", "graph", value=share,
                           threshold=0.0, samples=len(missing)),), treatment="optimize-all-params", explains=("loss-plateau", "lr-too-low"))


def opponents(window: Window) -> Iterator[Finding]:
    """Two optimizers step in turn, one holds all of the other's parameters and those of a network that feeds it."""
    known = optimizers(window)
    counts = window.last("cycle")
    steps = {int(r["index"]): int(r.get("steps") or 0) for r in (counts.get("optimizers") or ())} if counts is not None else {}
    for a, outer in known.items():
        for b, inner in known.items():
            mine, theirs = set(outer.get("uids") or ()), set(inner.get("uids") or ())
            if a == b or not theirs or not theirs < mine or min(steps.get(a, 0), steps.get(b, 0)) < 3 or not in_turn(window, a, b):
                continue
            if not any(feeds(run, mine - theirs, theirs) for run in passes(window)):
                continue
            names = [parameters(window)[u]["name"] for u in sorted(theirs) if u in parameters(window)]
            yield Finding(
                "optimizer-wrong-params", "certain", "harmful", "one optimizer also steps the network that another optimizer trains",
                f"Leave the parameters of {quoted(window, inner.at, 'the other optimizer')} out of {quoted(window, outer.at, 'this one')}.",
                Where.at(outer.at, also=(str(inner.at),) if inner.at else ()), first_step=0,
                evidence=(Evidence(f"all {count(len(theirs), 'parameter')} of the optimizer at {inner.at} ({shown(names)}) are also held by the one at {outer.at}; both step in turn after "
                                   "backwards of their own, and its remaining parameters feed the shared ones", "optimizer", value=float(len(theirs)), threshold=0.0,
                                   samples=min(steps[a], steps[b])),))
            return


def in_turn(window: Window, a: int, b: int) -> bool:
    """Both step again and again, each after a backward of its own."""
    rows = [(int(r["optimizer"]), int(r["backwards"])) for r in window.steps if r["optimizer"] in (a, b)]
    changes = sum(x[0] != y[0] for x, y in pairwise(rows))
    own = [n for _, n in rows]
    return changes >= 4 and sum(n > 0 for n in own) > 0.8 * len(own)


def feeds(run: Pass, first: set[int], second: set[int]) -> bool:
    """Values made with the first parameters enter operations that use the second."""
    start = {t for op in run.uses(first) for t in op.outs}
    after = run.trace.forward(start)
    return any(op.index in after for op in run.uses(second))
