"""What several ranks of one run have in common: data, parameters, and how they speak to each other.

A rule that compares ranks asks ``leading`` first, so that it speaks once for all of them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.loaders import TRAIN, construction, loaders, roles
from osler.rules.script import LOOPS, around, below_function, call_name, calls, origin, parse, root, tree, words

REDUCING = frozenset(("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor"))
POINT_TO_POINT = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv", "all_to_all", "all_to_all_single", "scatter"))
SHARDED_BY_DESIGN = re.compile(r"\bfsdp\b|fully_shard|FullyShardedDataParallel|DTensor|parallelize_module|PipelineStage|torch\.distributed\.rpc|deepspeed", re.I)


def group(window: Window) -> Fact | None:
    """The process group of more than one member that this process joined."""
    found = [f for f in window.facts("process-group") if int(f.get("world") or 1) > 1]
    return found[-1] if found else None


def leading(window: Window) -> bool:
    """Whether this is the lowest rank of a group of which other windows are at hand."""
    return group(window) is not None and bool(window.peers) and all(window.rank < peer.rank for peer in window.peers)


def everyone(window: Window) -> list[Window]:
    return [window, *window.peers]


def sharded_by_design(windows: list[Window]) -> bool:
    """Parameters or layers are split over the ranks, so that nothing has to agree."""
    texts = any(SHARDED_BY_DESIGN.search(text) for text in windows[0].sources.values())
    prints = any(f.get("sharded") for w in windows for f in w.facts("parameter-print"))
    return texts or prints or any(f.get("name") in POINT_TO_POINT and not f.get("library") for w in windows for f in w.facts("collective"))


# -- parameters ------------------------------------------------------------------------------------------------

Prints = dict[tuple[int, int], list[float | None]]


def prints(window: Window) -> Prints:
    """(optimizer, steps done) to one number for each parameter."""
    return {(int(f["optimizer"]), int(f["number"])): list(f.get("values") or ()) for f in window.facts("parameter-print")}


def shapes(window: Window) -> dict[int, list[Any]]:
    return {int(f["optimizer"]): list(f.get("shapes") or ()) for f in window.facts("parameter-print")}


def differing(windows: list[Window]) -> dict[tuple[int, int], set[int]]:
    """For every sample that all ranks took: positions of the parameters that are not the same on all of them.

    A position that no rank could read, or that is not finite anywhere, differs from nothing.
    """
    taken = [prints(w) for w in windows]
    found = {}
    for key in sorted(set.intersection(*(set(t) for t in taken))):
        columns = zip(*(t[key] for t in taken), strict=False)
        found[key] = {i for i, values in enumerate(columns) if None not in values and all(v == v for v in values if v is not None) and len(set(values)) > 1}
    return found


def same_program(windows: list[Window]) -> bool:
    """Every rank trains parameters of the same shapes with the same settings."""
    def settings(w: Window) -> list[Any]:
        return [(f.get("class"), str(f.get("defaults")), [g.get("lr") for g in f.get("groups") or ()]) for f in w.facts("optimizer")]
    first = windows[0]
    return all(shapes(w) == shapes(first) and settings(w) == settings(first) for w in windows[1:])


# -- communication ---------------------------------------------------------------------------------------------

def collectives(window: Window) -> list[Fact]:
    """The newest fact of each line that called a collective."""
    newest = {(f.get("name"), str(f.at)): f for f in window.facts("collective")}
    return list(newest.values())


def kinds(fact: Fact) -> Counter[str]:
    return Counter(fact.get("kinds") or {})


def of_kind(window: Window, *wanted: str, after: int | None = None) -> list[Fact]:
    """Collectives that were seen with a tensor of one of these kinds (and were still called after so many steps)."""
    return [f for f in collectives(window) if any(kinds(f)[k] for k in wanted) and (after is None or int(f.get("last_step") or 0) >= after)]


def wrapped(window: Window) -> list[Fact]:
    return window.facts("ddp")


def reduces(window: Window) -> bool:
    """Gradients or parameters are exchanged in training, by the wrapper or by hand."""
    called = any(f.get("wrapper") and not f.get("no_sync") for f in window.facts("rank-step"))
    by_hand = [f for f in of_kind(window, "gradient", "flat", "like a parameter", "parameter", after=1) if f.get("name") != "broadcast"]
    return (bool(wrapped(window)) and called) or bool(by_hand)


# -- data ------------------------------------------------------------------------------------------------------

def batches(window: Window) -> dict[int, list[Any]]:
    """Number of a looked-at step to what the called roots were given in it: (rows, order-free hash) by call."""
    return {int(f["number"]): [tuple(c) for c in f.get("calls") or ()] for f in window.facts("rank-step") if f.get("calls")}


def same_batches(windows: list[Window]) -> tuple[int, int]:
    """In how many of the looked-at steps all ranks were given the same rows, and how many steps that were."""
    taken = [batches(w) for w in windows]
    common = sorted(set.intersection(*(set(t) for t in taken)))
    return sum(all(t[k] == taken[0][k] for t in taken[1:]) for k in common), len(common)


def training_loaders(window: Window) -> dict[int, Fact]:
    who = roles(window)
    return {index: fact for index, fact in loaders(window).items() if who.get(index) == TRAIN}


def rows(window: Window, loader: int) -> dict[tuple[int, int], int]:
    """(pass, position) to the fingerprint of the row served there."""
    table = window.stream("rows")
    table = table[table["loader"] == loader]
    return {(int(p), int(i)): int(h) for p, i, h in zip(table["pass_"], table["position"], table["hash"], strict=True)}


def same_rows(windows: list[Window], loader: int) -> tuple[float, int]:
    """Share of positions at which all ranks were served the same row, and number of positions compared."""
    taken = [rows(w, loader) for w in windows]
    common = set.intersection(*(set(t) for t in taken))
    same = sum(all(t[k] == taken[0][k] for t in taken[1:]) for k in common)
    return (same / len(common) if common else 0.0), len(common)


def overlap(a: Window, b: Window, loader: int, total: int) -> tuple[float, int]:
    """Rows that two ranks were both served in their first pass, as a multiple of what two independent passes over all ``total`` rows share; and how
    many rows that are. Zero where a rank was served one row twice: it draws with replacement, and makes no passes."""
    served = [[h for (p, _), h in rows(w, loader).items() if p == 1] for w in (a, b)]
    distinct = [set(s) for s in served]
    if any(len(d) < 0.97 * len(s) or len(s) < 0.2 * total for s, d in zip(served, distinct, strict=True)):
        return 0.0, 0
    common = len(distinct[0] & distinct[1])
    return common * total / (len(distinct[0]) * len(distinct[1])), common


# -- places ----------------------------------------------------------------------------------------------------

def sampler_line(window: Window, loader: Fact) -> Location | None:
    """Where the sampler that a loader was given is made."""
    call = construction(window, loader)
    given = next((k.value for k in call.keywords if k.arg in ("sampler", "batch_sampler")), None) if call is not None else None
    if given is None or loader.at is None:
        return None
    if isinstance(given, ast.Call):
        return Location(loader.at.file, given.lineno)
    name = root(given)
    found = origin(window, loader.at, name) if name else None
    return Location(loader.at.file, found.lineno) if found is not None else None


def iteration_line(window: Window, loader: Fact) -> Location | None:
    """The loop inside ``__iter__`` of an iterable data set of the user's own."""
    at = Location.from_json(loader.get("dataset_at"))
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None:
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "__iter__" and node.lineno <= at.line + 1 <= (node.end_lineno or 0) + 1 and node.lineno >= at.line - 3:
            inner = next((n for n in ast.walk(node) if isinstance(n, LOOPS)), None)
            return Location(at.file, inner.lineno if inner is not None else node.lineno)
    return at


DRAWS_ORDER = frozenset(("randperm", "permutation", "shuffle", "permuted"))
DRAWS_ROWS = frozenset(("randint", "choice", "choices", "sample", "integers", "multinomial", "rand", "randn"))
SEEDS = frozenset(("manual_seed", "seed", "seed_everything", "set_seed", "fix_seed"))


def drawing(window: Window, at: Location) -> tuple[ast.Call | None, Location | None]:
    """The call that draws the rows of a batch around a training line, and the line that seeds it."""
    module = tree(window, at.file)
    statements = around(window, at)
    scope: ast.AST | None = next((s for s in reversed(statements) if isinstance(s, ast.FunctionDef)), module)
    functions = {call_name(c) for c in calls(scope)}
    scopes = [scope, *(n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name in functions and n is not scope)] if module is not None else [scope]
    found = [c for s in scopes for c in calls(s, *DRAWS_ORDER, *DRAWS_ROWS)]
    ordered = [c for c in found if call_name(c) in DRAWS_ORDER]
    inside = [c for c in found if any(isinstance(s, LOOPS) for s in below_function(around(window, Location(at.file, c.lineno))))]
    picked = next((c for c in ordered), None) or next((c for c in inside if call_name(c) not in ("rand", "randn")), None) or next(iter(inside), None)
    if picked is None:
        return None, None
    source = next((k.value for k in picked.keywords if k.arg == "generator"), None)
    if source is None and isinstance(picked.func, ast.Attribute):
        source = picked.func.value
    name = root(source)
    if name and name not in ("torch", "np", "numpy", "random"):
        made = origin(window, Location(at.file, picked.lineno), name)
        if made is not None:
            seeds = [c for c in calls(module, *SEEDS) if isinstance(c.func, ast.Attribute) and root(c.func.value) == name]
            return picked, Location(at.file, seeds[0].lineno if seeds else made.lineno)
    return picked, seed_line(window, at.file)


def seed_line(window: Window, file: str) -> Location | None:
    """The last line that seeds a global generator."""
    named = [c for c in calls(tree(window, file), *SEEDS) if not (isinstance(c.func, ast.Attribute) and isinstance(c.func.value, ast.Call))]
    return Location(file, max(named, key=lambda c: c.lineno).lineno) if named else None


RANK_WORD = re.compile(r"(^|_)(rank|local_rank|global_rank|process_index|worker_id|world|world_size|num_replicas|nprocs|n_ranks)($|_)", re.I)


def shards_by_hand(window: Window) -> bool:
    """The text takes every n-th item, or a chunk, by rank: ``x[rank::world]``, ``islice(…, rank, None, world)``, ``i % world == rank``, ``chunk(world)[rank]``."""
    for text in window.sources.values():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            sliced = isinstance(node, ast.Slice) and node.step is not None and _about_rank(node)
            modulo = isinstance(node, ast.Compare) and any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(node)) and _about_rank(node)
            cut = isinstance(node, ast.Call) and call_name(node) in ("islice", "array_split", "chunk", "split", "tensor_split", "split_dataset_by_node", "shard") and _about_rank(node)
            ranged = isinstance(node, ast.Call) and call_name(node) == "range" and len(node.args) == 3 and _about_rank(node)
            picked = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and call_name(node.value) in ("chunk", "split", "array_split") and _about_rank(node)
            if sliced or modulo or cut or ranged or picked:
                return True
    return False


def _about_rank(node: ast.AST) -> bool:
    return any(RANK_WORD.search(word) for word in words(node)) or any(call_name(c) in ("get_rank", "get_world_size") for c in calls(node))
