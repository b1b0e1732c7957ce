from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import constructions, quoted
from osler.rules.loaders import dataset_line
from osler.rules.ranks import (
    DRAWS_ORDER,
    RANK_WORD,
    differing,
    drawing,
    everyone,
    group,
    iteration_line,
    leading,
    overlap,
    reduces,
    same_batches,
    same_rows,
    sampler_line,
    sharded_by_design,
    training_loaders,
    wrapped,
)
from osler.rules.script import LOOPS, around, below_function, call_name, calls, function_around, origin, place, root


@rule("ddp-no-sampler", "distributed")
def check(window: Window, *, least_rows: int = 16, least_steps: int = 3, same: float = 0.95, least_share: float = 0.6) -> Iterator[Finding | NotChecked]:
    """Every rank trains on the same rows.

    What it is: no DistributedSampler, a sampler that is not told its rank, a stream that every rank reads in full, or random batches drawn
    from one seed on all ranks.
    How it is seen: fingerprints of the rows that the model was given, or that the training loader served, are compared between ranks at the same
    place: at least `least_steps` steps, or `least_rows` rows of which `same` agree; or the first pass of every rank is over all rows, and two ranks share `least_share` of the rows that passes in another
    order share by chance (ranks with rows of their own share none). Only where
    gradients or parameters are exchanged.
    Why it matters: the ranks compute the same gradients: nothing is gained by having more of them, and an epoch is as many passes over the data as there are ranks.
    What to do: `DistributedSampler(dataset)` in the training loader; by hand `rows[rank::world]`; for random batches `seed + rank`.
    When this is wrong: tensor and pipeline parallel programs feed all ranks alike on purpose, and are left out; so is validation, and data that a rank takes its part
    of after loading.
    Source: torch issue 31771; handbook A14. Thresholds: equality of fingerprints, so that chance plays no part.
    """
    if group(window) is not None and not window.peers:
        yield NotChecked("ddp-no-sampler", "only one rank of the group was recorded, so that ranks cannot be compared")
    if not leading(window):
        return
    ranks = everyone(window)
    if sharded_by_design(ranks) or not all(map(reduces, ranks)):
        return
    if not wrapped(window) and any(differing(ranks).values()):
        return  # each rank holds weights of its own: no data parallelism
    equal, looked = same_batches(ranks)
    if looked >= 2 and equal < 0.5 * looked:
        yield from whole_passes(window, ranks, least_rows, least_share)
        return
    served = training_loaders(window)
    for index, loader in served.items():
        share, count = same_rows(ranks, index)
        if count >= least_rows and share >= same:
            yield told(window, loader, f"{share:.0%} of {count} rows that the loader served were the same at the same position on all {len(ranks)} ranks", share, same, count)
            return
    if (looked >= least_steps or (looked and looked >= window.n_steps)) and equal == looked:
        words = f"in all {looked} steps looked at, the model was given the same rows on all {len(ranks)} ranks"
        if served and any(loader.get("sampler") for loader in served.values()):
            yield told(window, next(iter(served.values())), words, 1.0, 1.0, looked)
        else:
            yield drawn(window, words, looked)


def whole_passes(window: Window, ranks: list[Window], least_rows: int, least: float) -> Iterator[Finding]:
    """Another order on each rank, but each of them goes through everything."""
    for index, loader in training_loaders(window).items():
        total, size, length = loader.get("rows"), loader.get("batch_size"), loader.get("length")
        if not all(isinstance(n, int) for n in (total, size, length)) or loader.get("iterable") or loader.get("sampler") not in ("RandomSampler", "SequentialSampler"):
            continue
        if same_rows(ranks, index)[0] >= 0.5 or int(length) * int(size) < 0.9 * int(total):
            continue  # each rank takes its part of a batch after loading
        ratio, common = min(overlap(window, peer, index, int(total)) for peer in window.peers)
        if common >= least_rows and ratio >= least:
            yield told(window, loader, f"the first pass of every rank is over all {total} rows: of those looked at, two ranks share {common}, {ratio:.0%} of what passes "
                       "over the same rows in another order share", ratio, least, common)
            return


def told(window: Window, loader: Fact, evidence: str, value: float, threshold: float, samples: int) -> Finding:
    at, also = loader.at, [dataset_line(window, loader)]
    replicas, world = loader.get("replicas"), group(window)
    why = "makes every rank go through the whole data set"
    fix = "Give the training loader a DistributedSampler"
    if loader.get("iterable"):
        also, at = [loader.at, *also], iteration_line(window, loader) or loader.at
        fix = "Yield only every world-th item, beginning with the rank,"
    elif (cut := shard_line(window, loader)) is not None:
        also, at = [loader.at, *also], cut
        why, fix = "cuts the same part out on every rank", "Cut out another part on each rank"
    elif isinstance(replicas, int):
        made = sampler_line(window, loader)
        also, at = [loader.at, *also], made or loader.at
        size = int(world.get("world") or 0) if world is not None else 0
        why = f"tells the sampler of {replicas} replicas where there are {size}" if replicas != size else "tells every rank the same rank"
        fix = "Leave num_replicas and rank to the process group, or pass its own"
    return Finding(
        "ddp-no-sampler", "certain", "harmful", f"every rank trains on the same rows: {quoted(window, at, 'the loader')} {why}",
        f"{fix} at {quoted(window, at, 'the construction of the loader')}.",
        Where.at(at, also=tuple(str(a) for a in also if a is not None and a != at)), first_step=0,
        evidence=(Evidence(evidence, "rows/hash", value=value, threshold=threshold, samples=samples),), treatment="sampler", explains=("ddp-set-epoch-missing",))


def shard_line(window: Window, loader: Fact) -> Location | None:
    """Where a function that is told the rank cuts a Subset out."""
    if loader.get("dataset") != "Subset":
        return None
    for at in constructions(window, "Subset"):
        function = function_around(around(window, at))
        if function is not None and any(RANK_WORD.search(a.arg) for a in function.args.args) and not any(True for _ in calls(function, "backward")):
            return at
    return None


def drawn(window: Window, evidence: str, samples: int) -> Finding:
    """Batches made without a loader: where they are drawn, or where the data come from."""
    backward = next((f.at for f in window.facts("backward") if f.at is not None), None)
    at: Location | None = backward
    also: list[Location | None] = [backward]
    fix = "Give every rank rows of its own"
    if backward is not None:
        call, seed = drawing(window, backward)
        if call is not None:
            spot = Location(backward.file, call.lineno)
            at, also = spot, [seed]
            if call_name(call) not in DRAWS_ORDER and seed is not None:
                at, also = seed, [spot]
            fix = "Take every world-th of these, beginning with the rank," if at == spot else "Add the rank to the seed"
        else:
            at, also = sliced(window, backward) or backward, [backward]
            fix = "Take rows[rank::world]"
    return Finding(
        "ddp-no-sampler", "certain", "harmful", "every rank trains on the same rows",
        f"{fix} at {quoted(window, at, 'the line that makes the batches')}.",
        Where.at(at, also=tuple(str(a) for a in also if a is not None and a != at)), first_step=0,
        evidence=(Evidence(evidence, "rows/hash", value=1.0, threshold=1.0, samples=samples),), treatment="sampler", explains=("ddp-set-epoch-missing",))


def sliced(window: Window, backward: Location) -> Location | None:
    """Origin of the data that the loop around the backward pass cuts its batches from."""
    inner = [s for s in below_function(around(window, backward)) if isinstance(s, LOOPS)]
    for loop in reversed(inner):
        for node in ast.walk(loop):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice):
                name = root(node.value)
                made = origin(window, Location(backward.file, node.lineno), name) if name else None
                if made is not None:
                    return place(f"{backward.file}:{made.lineno}")
    return place(f"{backward.file}:{inner[-1].lineno}") if inner else None
