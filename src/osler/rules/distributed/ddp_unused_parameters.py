from __future__ import annotations

import re
from collections.abc import Iterator

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.graph_questions import count, modules, parameters, reached, shown
from osler.rules.ranks import wrapped

REFUSED = "Expected to have finished reduction in the prior iteration"
INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


@rule("ddp-unused-parameters", "distributed")
def check(window: Window, *, least_steps: int = 5) -> Iterator[Finding]:
    """Parameters of the wrapped model take no part in the loss.

    What it is: a layer that is built but not used, a head whose output the loss leaves out, or a branch taken in some steps only, inside
    DistributedDataParallel.
    How it is seen: torch refuses the second forward with "Expected to have finished reduction in the prior iteration" (or, where the script catches that, the graph of the
    first backward does not reach parameters of the wrapper and no step follows); or `find_unused_parameters=True` is
    set and in `least_steps` steps or more every parameter was used (a note).
    Why it matters: the reducer waits for every gradient it was promised: the run ends, or hangs. Looking for unused parameters costs one more walk over the graph in each step.
    What to do: take the layer out, use its output in the loss, or pass `find_unused_parameters=True`.
    When this is wrong: the same message appears when the outputs that the loss uses are hidden from the wrapper in an object it does not
    search; return them as tensors, tuples or dictionaries.
    Source: torch issues 43259 and 22436; the documentation of DistributedDataParallel.
    """
    failed = next((f for f in window.facts("exception") if REFUSED in str(f.get("message"))), None)
    if failed is not None:
        yield told(window, failed)
        return
    walks = window.facts("graph")
    whole = bool(walks) and not any(f.get("reentrant") or f.get("truncated") or f.get("compiled") for f in walks)
    for fact in wrapped(window):
        left = set(fact.get("uids") or ()) - reached(window)
        if whole and window.final and left and window.n_steps <= 1 and not fact.get("find_unused_parameters") and not fact.get("static_graph"):
            yield told(window, None)
            return
        steps = window.facts("gradients")
        uids = set(fact.get("uids") or ())
        if not fact.get("find_unused_parameters") or not uids or not steps or int(steps[-1].get("steps_seen") or 0) < least_steps:
            continue
        idle = uids & {*steps[-1].get("never", ()), *steps[-1].get("sometimes", ()), *steps[-1].get("always_zero", ())}
        if not idle and uids <= reached(window):
            yield Finding(
                "ddp-unused-parameters", "certain", "note", "find_unused_parameters=True searches the graph in every step, and nothing is unused",
                f"Leave it out at {quoted(window, fact.at, 'the construction of the wrapper')}.", Where.at(fact.at), first_step=0,
                evidence=(Evidence(f"all {count(len(uids), 'parameter')} of the wrapped model got a gradient in each of {steps[-1].get('steps_seen')} steps looked at",
                                   "gradients", value=float(len(uids)), threshold=float(len(uids)), samples=int(steps[-1].get("steps_seen") or 0)),))
            return


def told(window: Window, failed: Fact | None) -> Finding:
    facts = wrapped(window)
    fact = facts[-1] if facts else None
    known, mods = parameters(window), modules(window)
    uids = list(fact.get("uids") or ()) if fact is not None else []
    match = INDICES.search(str(failed.get("message"))) if failed is not None else None
    named = [uids[int(i)] for i in match[1].split() if int(i) < len(uids)] if match else []
    idle = [u for u in named or [u for u in uids if u not in reached(window)] if u in known]
    names = shown((str(known[u]["name"]) for u in idle), 4)
    built = spot(mods.get(known[idle[0]]["module"], {}).get("at")) if idle else None
    at = fact.at if fact is not None else failed.at if failed is not None else None
    proof = f"torch: {str(failed.get('message'))[:100]}…" if failed is not None else (
        f"the graph of the first backward does not reach {count(len(idle), 'parameter')} that the wrapper waits for, and no step came after it")
    return Finding(
        "ddp-unused-parameters", "certain", "fatal", f"the reducer waits for gradients of {names or 'parameters that the loss does not reach'}",
        f"Use {names or 'them'} in the loss or take {'it' if len(idle) == 1 else 'them'} out ({quoted(window, built, 'where they are built')}); where a branch is left out on purpose, "
        f"pass find_unused_parameters=True at {quoted(window, at, 'the construction of the wrapper')}.",
        Where.at(at, parameter=str(known[idle[0]]["name"]) if idle else None, also=tuple(str(a) for a in (built, failed.at if failed is not None else None) if a is not None)), first_step=window.n_steps,
        evidence=(Evidence(proof, "exception" if failed is not None else "graph", samples=1),), explains=("script-failed", "unused-module", "graph-broken"))
