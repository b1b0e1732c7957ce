from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.loaders import TRAIN, loaders, roles
from osler.rules.ranks import group, rows
from osler.rules.script import LOOPS, Loop, around, below_function, calls, tree, words

NEAR = 4


@rule("ddp-set-epoch-missing", "distributed")
def check(window: Window, *, least_rows: int = 16, same: float = 0.99) -> Iterator[Finding]:
    """The sampler is never told which epoch it is.

    What it is: a DistributedSampler shuffles with seed + epoch; without `set_epoch` the epoch stays 0 and every pass has the same order. The
    same goes for data sets and samplers of one's own that have a `set_epoch`, and for a permutation drawn from a generator that every epoch seeds alike.
    How it is seen: the training loader is passed over at least twice, its sampler or data set has a `set_epoch`, and its epoch is the same number in
    each pass; for another kind of sampler the rows of two passes also have to be the same in the same order (`same` of at least `least_rows`).
    Why it matters: batches have the same members in every epoch: shuffling does nothing, and small data sets generalise worse.
    What to do: `sampler.set_epoch(epoch)` at the head of the epoch loop, before the loader is iterated.
    When this is wrong: samplers made with shuffle=False repeat their order on purpose, and are left out; frameworks that call set_epoch themselves
    change the number.
    Source: DALLE-pytorch pull request 230; the torch documentation of DistributedSampler.
    """
    who = roles(window)
    for index, loader in loaders(window).items():
        told = list(loader.get("set_epoch") or ())
        begun = [f for f in window.facts("loader-begin") if f.get("loader") == index]
        if not told or len(begun) < 2 or who.get(index) != TRAIN or loader.get("sampler_shuffle") == 0:
            continue
        epochs = [dict(f.get("epochs") or {}) for f in begun]
        repeated, count = same_order(window, index)
        if count >= least_rows and repeated < same:
            continue
        known = [name for name in told if any(name in e for e in epochs)]
        if any(len({e.get(name) for e in epochs}) > 1 for name in known):
            continue
        plain = loader.get("sampler") == "DistributedSampler" and "sampler" in known
        if plain or (count >= least_rows and repeated >= same):
            yield told_epoch(window, loader, begun, told[0], repeated, count)
            return
    if group(window) is not None:
        yield from reseeded(window)


def same_order(window: Window, loader: int) -> tuple[float, int]:
    """Share of positions at which the first two passes were served the same row, and number of positions compared."""
    table = rows(window, loader)
    pairs = [(h, table[2, i]) for (p, i), h in table.items() if p == 1 and (2, i) in table]
    return (sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0), len(pairs)


def epoch_loop(window: Window, fact: Fact) -> Location | None:
    """The loop around the passes: the innermost one that holds the line where a pass begins but is not that line's own."""
    frames = [fact.at, *(spot(raw) for raw in fact.get("up") or ())]
    for frame in frames:
        if frame is None:
            continue
        heads = [s for s in below_function(around(window, frame)) if isinstance(s, LOOPS) and s.lineno != frame.line]
        if heads:
            return Location(frame.file, heads[-1].lineno)
    return None


def told_epoch(window: Window, loader: Fact, begun: list[Fact], what: str, repeated: float, count: int) -> Finding:
    inner, outer = begun[0].at, epoch_loop(window, begun[0])
    near = inner is not None and outer is not None and inner.file == outer.file and 0 <= inner.line - outer.line <= NEAR
    at = inner if near or outer is None else outer
    said = next((Location(at.file, c.lineno) for c in calls(tree(window, at.file), "set_epoch") if c.args and not words(c.args[0])), None) if at is not None else None
    at = said or at  # a call that always says the same
    holder = {"sampler": "sampler", "batch_sampler": "batch sampler", "dataset": "data set"}[what]
    evidence = [Evidence(f"the {holder}'s epoch stayed the same over {len(begun)} passes that were looked at", "loader/epoch", value=float(len(begun)), threshold=2.0, samples=len(begun))]
    if count:
        evidence.append(Evidence(f"{repeated:.0%} of {count} rows came at the same position in the first and the second pass", "rows/hash", value=repeated, threshold=1.0, samples=count))
    return Finding(
        "ddp-set-epoch-missing", "certain", "harmful", f"the {holder} is never told the epoch: every pass has the same order",
        f"Call set_epoch(epoch) on the {holder} inside {quoted(window, outer, 'the epoch loop')}, before {quoted(window, inner, 'the loader is iterated')}.",
        Where.at(at, also=tuple(str(a) for a in (inner, outer, loader.at) if a is not None and a != at)), first_step=begun[1].step,
        evidence=tuple(evidence), treatment="set-epoch")


SEEDING = ("manual_seed", "default_rng", "RandomState", "Random", "seed")
ORDERING = ("randperm", "permutation", "shuffle", "sample")


def reseeded(window: Window) -> Iterator[Finding]:
    """Inside the epoch loop a generator is made from a seed that does not depend on it, and draws the order of the epoch."""
    backward = next((f for f in window.facts("backward") if f.at is not None), None)
    if backward is None or backward.at is None or window.n_steps < 4:
        return
    heads = [s for s in below_function(around(window, backward.at)) if isinstance(s, LOOPS)]
    for loop in heads[:-1]:
        changing = varying(loop)
        for call in calls(loop, *SEEDING):
            arguments = [*call.args, *(k.value for k in call.keywords)]
            if not arguments or any(words(a) & changing for a in arguments):
                continue
            batches = next(s for s in heads if s is not loop and s.lineno > loop.lineno)
            drawn = [c for c in calls(loop, *ORDERING) if call.lineno <= c.lineno <= batches.lineno]
            if drawn:
                at = Location(backward.at.file, call.lineno)
                yield Finding(
                    "ddp-set-epoch-missing", "certain", "harmful", "the order of the rows is drawn from the same seed in every epoch",
                    f"Let the seed depend on the epoch: {quoted(window, at, 'the line that seeds it')}.",
                    Where.at(at, also=(f"{at.file}:{drawn[0].lineno}", f"{at.file}:{loop.lineno}")), first_step=0,
                    evidence=(Evidence(f"the seed at line {at.line} does not depend on the loop at line {loop.lineno}, and the order drawn at line {drawn[0].lineno} does not either",
                                       "source", samples=1),), treatment="set-epoch")
                return


def varying(loop: Loop) -> set[str]:
    """Names that the loop changes."""
    names = words(loop.target) if isinstance(loop, ast.For | ast.AsyncFor) else set()
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign):
            names |= words(node.target)
    return names
