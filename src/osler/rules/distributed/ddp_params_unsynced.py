from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.graph_questions import count, modules, parameters, shown
from osler.rules.ranks import (
    collectives,
    differing,
    everyone,
    group,
    kinds,
    leading,
    of_kind,
    prints,
    same_batches,
    same_program,
    sampler_line,
    seed_line,
    sharded_by_design,
    shards_by_hand,
    training_loaders,
    wrapped,
)
from osler.rules.script import call_name, calls, parse, words

SCALE_FREE = frozenset(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor", "Rprop", "Lion", "LBFGS", "Adadelta"))

ASIDE = frozenset(("state_dict", "load_state_dict", "parameters", "named_parameters", "eval", "train", "save", "to", "modules", "children", "generate", "save_pretrained"))


@rule("ddp-params-unsynced", "distributed")
def check(window: Window, *, least_samples: int = 2) -> Iterator[Finding | NotChecked]:
    """The ranks do not train one model: their gradients are not averaged.

    What it is: the model was never wrapped; the wrapped module is called past its wrapper; every backward runs under `no_sync`; the hand-written
    all_reduce is missing, comes too late, or works on a copy; the ranks began with different weights; some parameters lie outside the wrapper; or
    gradients are summed over ranks and never divided.
    How it is seen: a number is made of every parameter after the steps 1, 2, 5, 10, 20, … of each rank. Under data parallelism those of all ranks are the
    same bits; they must differ in at least `least_samples` samples, the last one among them, while all ranks train the same shapes with the same
    settings. What was reduced and which way the model was called says why.
    Why it matters: every rank trains a model of its own on its own part of the data, and the one that is saved has seen no more than that.
    What to do: `model = DistributedDataParallel(model)`, and call that; by hand: broadcast the weights once, all_reduce every gradient between backward
    and step, divide by the world size.
    When this is wrong: averaging parameters every few steps, sharded and pipelined models, and processes that train different settings are
    no data parallelism, and are left out; without signs that the data are split by rank only a note is made.
    Source: torch issue 104336 (hooks lost after wrapping) and TrainCheck (OSDI 2025), whose invariants need runs to learn from. No threshold: the bits are the same or not.
    """
    if group(window) is not None and not window.peers:
        yield NotChecked("ddp-params-unsynced", "only one rank of the group was recorded, so that ranks cannot be compared")
    if not leading(window):
        return
    ranks = everyone(window)
    if sharded_by_design(ranks):
        return
    if not same_program(ranks):
        return
    samples = differing(ranks)
    later = {key: where for key, where in samples.items() if key[1] > 0}
    if not later:
        yield NotChecked("ddp-params-unsynced", "no parameters were sampled at the same step on all ranks")
        return
    drifting = steadily(later, least_samples)
    if not drifting:
        if not any(later.values()):
            yield from undivided(window)
        return
    if now_and_then(window, sum(len(f.get("values") or ()) for f in window.facts("parameter-print") if f.get("number") == 0)):
        return
    if not wrapped(window) and of_kind(window, "activation", after=1) and same_batches(ranks)[0]:
        return  # layers split over the ranks
    yield from why(window, ranks, samples, drifting)


def steadily(later: dict[tuple[int, int], set[int]], least: int) -> dict[tuple[int, int], set[int]]:
    """Samples of the optimizers whose parameters differ in every one of them (the first step may be alike: Adam's first is nearly a sign)."""
    found = {}
    for optimizer in {o for o, _ in later}:
        own = {key: where for key, where in later.items() if key[0] == optimizer and (where or key[1] > 1)}
        if len(own) >= least and all(own.values()):
            found.update(own)
    return dict(sorted(found.items()))


def now_and_then(window: Window, parameters_total: int) -> bool:
    """Parameters themselves are averaged, and not in every step: nothing has to agree in between."""
    if of_kind(window, "gradient"):
        return False
    direct = of_kind(window, "parameter", after=1)
    written = any(f.get("outside") for f in window.facts("parameter-print"))
    if written and not wrapped(window) and any(int(f.get("last_step") or 0) > 0 for f in collectives(window)):
        return True  # averaged as state dictionaries
    other = [f for f in of_kind(window, "flat", "like a parameter", after=1) if not kinds(f)["parameter"]]
    rare = [f for f in other if int(f.get("calls") or 0) < 0.7 * window.n_steps * (1 if kinds(f)["flat"] else max(parameters_total, 1))]
    return bool(direct or rare)


def past_line(window: Window, at: Location | None) -> Location | None:
    """The call through ``.module``; where the module calls itself in a method, the call of that method."""
    if at is None or ".module" in window.line(at.file, at.line):
        return at
    module = parse(window.sources.get(at.file, ""))
    found = [c.lineno for c in ast.walk(module) if isinstance(c, ast.Call) and call_name(c) not in ASIDE
             and any(isinstance(n, ast.Attribute) and n.attr == "module" for n in ast.walk(c.func))] if module is not None else []
    return Location(at.file, found[0]) if found else at


def why(window: Window, ranks: list[Window], samples: dict[Any, set[int]], drifting: dict[Any, set[int]]) -> Iterator[Finding]:
    names = uids_of(window, drifting)
    steps = window.facts("rank-step")
    wrappers = wrapped(window)
    gradients = of_kind(window, "gradient", "flat", "like a parameter", after=0)
    at_start = any(where for key, where in samples.items() if key[1] == 0)
    differ = f"after every one of {len(drifting)} sampled steps {count(len(names), 'parameter')} differed between {len(ranks)} ranks"
    held = {u for f in wrappers for u in f.get("uids") or ()}
    if wrappers and names and not names & held and any(held & set(f.get("uids") or ()) for f in window.facts("optimizer")):
        yield outside(window, names, differ, len(drifting))
        return
    if wrappers:
        past = [f for f in steps if f.get("inner") and not f.get("wrapper")]
        silent = [f for f in steps if f.get("wrapper") and f.get("no_sync")]
        if past and len(past) == len([f for f in steps if f.get("inner") or f.get("wrapper")]):
            at = past_line(window, past[0].at)
            yield told(window, at, [wrappers[-1].at], "the module inside DistributedDataParallel is called past its wrapper, so that no gradient is reduced",
                       f"Call the wrapped model, not its .module, at {quoted(window, at, 'the forward of the training step')}.", differ, len(drifting))
        elif silent and len(silent) == len([f for f in steps if f.get("wrapper")]):
            at = no_sync_line(window) or wrappers[-1].at
            yield told(window, at, [wrappers[-1].at], "every backward runs under no_sync, so that no gradient is reduced",
                       f"Leave no_sync for the last backward before a step: {quoted(window, at, 'the no_sync block')}.", differ, len(drifting))
        elif names <= held or not names:
            at = wrappers[-1].at
            yield told(window, at, [], "the ranks drift apart although the model is wrapped in DistributedDataParallel",
                       f"Wrap the model after its last move or cast ({quoted(window, at, 'the construction of the wrapper')}), and let backward() fill .grad.", differ, len(drifting))
        return
    built: list[Location | None] = [at for at in roots(window, names) if at is not None]
    if gradients and at_start and all(f.get("name") == "all_reduce" for f in gradients):
        at = built[0] if built else None
        seed = seed_line(window, at.file) if at is not None else None
        yield told(window, at, [seed, gradients[0].at], "the ranks began with different weights: their gradients are averaged, their models are not the same",
                   f"Broadcast the weights of rank 0 after {quoted(window, at, 'the model is built')}, or seed all ranks alike before it.",
                   f"{differ}, and before the first one too", len(drifting))
        return
    if gradients:
        fact = gradients[-1]
        hint = {"reduce": "reduce gives the result to one rank only: use all_reduce", "all_gather": "what was gathered never reaches .grad"}.get(
            str(fact.get("name")), "reduce every .grad itself between backward and step, and wait for it")
        late = misplaced(window, fact)
        if late is not None:
            yield told(window, late, [fact.at, *built], "gradients are reduced outside the span between backward and step",
                       f"Reduce them after backward and before the step: {quoted(window, late, 'the reduction')}.", differ, len(drifting))
            return
        yield told(window, fact.at, built, f"{fact.get('name')} does not make the gradients of all ranks the same",
                   f"{hint.capitalize()}: {quoted(window, fact.at, 'the reduction')}.", differ, len(drifting))
        return
    values = [f for f in collectives(window) if kinds(f) and f.get("name") == "all_reduce" and int(f.get("last_step") or 0) > 0 and int(f.get("calls") or 0) >= window.n_steps]
    split = any(isinstance(f.get("replicas"), int) and int(f["replicas"]) > 1 for f in training_loaders(window).values()) or shards_by_hand(window)
    at = built[0] if built else None
    also: list[Location | None] = [*(f.at for f in values), *(f.at for f in window.facts("optimizer"))]
    if not any("DistributedDataParallel" in text for text in window.sources.values()) and any("all_reduce" in text for text in window.sources.values()):
        also, at = [at, *also], next((f.at for f in window.facts("backward") if f.at is not None), at)
    also += [sampler_line(window, f) for f in training_loaders(window).values()]
    yield told(window, at, also, "the model is wrapped in nothing and no gradient is reduced: every rank trains a model of its own",
               f"Wrap the model in DistributedDataParallel once it is built and call the wrapper, or all_reduce every .grad after backward: {quoted(window, at, 'the model')}.",
               differ, len(drifting),
               severity="harmful" if split else "note")


def misplaced(window: Window, fact: Fact) -> Location | None:
    """The line of the training loop that reduces gradients when no backward has come since the last step."""
    if fact.get("position") != "before backward" or not kinds(fact)["gradient"]:
        return None
    backward = next((f.at for f in window.facts("backward") if f.at is not None), None)
    frames = [place for place in (fact.at, *map(spot, fact.get("up") or ())) if place is not None]
    return next((place for place in frames if backward is not None and place.function == backward.function), frames[-1] if frames else None)


def uids_of(window: Window, drifting: dict[Any, set[int]]) -> set[int]:
    """Uids of the parameters that differ in the newest sample of each optimizer."""
    newest = {optimizer: positions for (optimizer, _), positions in sorted(drifting.items())}
    listed = {int(f["optimizer"]): list(f.get("uids") or ()) for f in window.facts("parameter-print")}
    return {listed[o][i] for o, positions in newest.items() for i in positions if i < len(listed.get(o, ()))}


def roots(window: Window, uids: set[int]) -> list[Location | None]:
    """Construction lines of the roots that own these parameters."""
    known, mods = parameters(window), modules(window)
    owners = [known[u].get("root") for u in sorted(uids) if u in known]
    return [spot(mods.get(r, {}).get("at")) for r in dict.fromkeys(owners) if r is not None]


def told(window: Window, at: Location | None, also: list[Location | None], title: str, fix: str, evidence: str, samples: int, severity: str = "harmful",
         certainty: str = "certain") -> Finding:
    return Finding("ddp-params-unsynced", certainty, severity, title, fix, Where.at(at, also=tuple(dict.fromkeys(str(a) for a in also if a is not None and a != at))), first_step=1,
                   evidence=(Evidence(evidence, "parameter-print", value=float(samples), threshold=1.0, samples=samples),))


def outside(window: Window, names: set[int], differ: str, samples: int) -> Finding:
    known, mods = parameters(window), modules(window)
    rows = [known[u] for u in sorted(names) if u in known]
    own = [at for r in rows if (at := spot(mods.get(r["module"], {}).get("at"))) is not None]
    at = next(iter(own), None) or next(iter(roots(window, names)), None)
    return told(window, at, [f.at for f in wrapped(window)], f"{shown((str(r['name']) for r in rows), 3) or 'some parameters'} lie outside DistributedDataParallel and are not reduced",
                f"Put {quoted(window, at, 'them')} inside the module that is wrapped, before it is wrapped, or wrap it too.", differ, samples)


def no_sync_line(window: Window) -> Location | None:
    for file, text in window.sources.items():
        module = parse(text)
        for call in calls(module, "no_sync"):
            return Location(file, call.lineno)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, ast.Attribute) and node.attr in ("require_backward_grad_sync", "no_sync"):
                return Location(file, node.lineno)
    return None


def undivided(window: Window) -> Iterator[Finding]:
    """Gradients are the same on all ranks, but summed: they are as many times too large as there are ranks."""
    found = group(window)
    size = int(found.get("world") or 1) if found is not None else 1
    facts: list[Fact] = [f for f in of_kind(window, "gradient", after=1) if f.get("name") == "all_reduce" and f.get("op") == "SUM" and not f.get("library")]
    criteria = [f for f in window.facts("criterion") if f.get("phase") == 0]
    means = all(f.get("reduction") == "mean" for f in criteria) if criteria else all(str(f.get("root_op")).startswith("Mean") for f in window.facts("backward"))
    if not facts or not prints(window) or not means or divides(window):
        return
    others = [f for f in collectives(window) if f.get("name") == "all_reduce" and f is not facts[0] and kinds(f)["value"] and int(f.get("calls") or 0) >= window.n_steps]
    free = all(f.get("class") in SCALE_FREE for f in window.facts("optimizer"))
    at = facts[0].at
    yield told(window, at, [], f"gradients are summed over {size} ranks and never divided: they are {size} times too large",
               f"Divide by the world size after {quoted(window, at, 'the all_reduce')}, or use ReduceOp.AVG.",
               f"all_reduce with SUM on gradients at {at}, and nothing in the text divides by the number of ranks", int(facts[0].get("calls") or 0),
               severity="note" if free or others else "harmful", certainty="suspected" if others else "measured")


SIZE = re.compile(r"world|nproc|replica|ranks|^(size|ws|W|n|N|P|p|k|K|workers)$", re.I)


def divides(window: Window) -> bool:
    """Somewhere the text divides, or multiplies by an inverse, with a count of ranks in it (or divides a gradient at all)."""
    def counts(node: ast.AST) -> bool:
        return any(SIZE.search(w) for w in words(node))

    for text in window.sources.values():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
                right = node.right if isinstance(node, ast.BinOp) else node.value
                if counts(right) or "grad" in words(node):
                    return True
            scaled = isinstance(node, ast.Call) and call_name(node) in ("div_", "div", "mul_", "mul", "true_divide", "_foreach_div_", "_foreach_mul_")
            if scaled and ("grad" in words(node) or any(counts(a) for a in node.args)):  # type: ignore[attr-defined]
                return True
    return False
