from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import TRAIN, VALIDATION, dataset_line, loaders, roles
from osler.rules.measured_sets import VALIDATION_NAME, cut_line, defined, meant, on_a_grid, said
from osler.rules.rows_compared import number, tables
from osler.rules.script import around, below_function, bound, calls, origin, root, targets, trains, tree, words
from osler.rules.splits import sites

TRAIN_MASK = re.compile(r"^(train|tr)_?(mask|idx|index|indices|nodes|rows|ids)$", re.I)
OTHER_MASK = re.compile(r"^(va|val|valid|te|test)_?(mask|idx|index|indices|nodes|rows|ids)$", re.I)


@rule("train-val-overlap", "data")
def check(window: Window, *, share: float = 0.02, harmful: float = 0.05, min_rows: int = 5, sigmas: float = 4.0) -> Iterator[Finding | NotChecked]:
    """The same rows are trained on and validated on.

    **What it is.** Training and validation share rows: an index mistake, a split that is drawn twice with different random
    numbers, a validation loader over the training set, or a loss over all nodes of a graph.

    **How it is seen.** Fingerprints of the input values of each row (of loaders, or of the tensors and arrays that a run without loaders holds): a share of the validation rows also came out of the training
    loader. Rows of few distinct values meet by chance; how often is told by different training rows that are equal, and only what exceeds it (by `share` and `sigmas` standard errors) counts; above `harmful` it is harmful. Or in the
    text: rows are drawn again in each epoch of one training, or a training mask exists and has no part in the training loss, which runs over all rows.

    **Why it matters.** The validation figure measures memory.

    **What to do.** Split once, with a fixed seed, into disjoint indices; remove duplicates before splitting.

    **When this is wrong.** A figure over the training set on purpose: it is recognised by its name, and by being the training set itself
    (the same object, or rows that nothing names for validation).

    **Source.** Handbook A §22 (exact content); lightning issue 9865.
    """
    rows = window.stream("rows")
    role, known = roles(window), loaders(window)
    exact = {int(f["loader"]): f for f in tables(window) if f.get("source") == "loaders" and isinstance(f.get("loader"), int) and f.get("overlap")}
    training = [i for i, r in role.items() if r == TRAIN and i in known and ((rows["loader"] == i).any() or exact)]
    judging = [i for i in sorted({*role, *exact}) if i in known and i not in training and role.get(i, VALIDATION) == VALIDATION and (i in exact or (rows["loader"] == i).any())]
    if not training or not judging:
        found = whole_graph(window) or tensors(window, share, harmful, min_rows) or drawn_again(window)
        if found is not None:
            yield found
        elif not tables(window):
            yield NotChecked("train-val-overlap", "no training and validation DataLoader was seen whose rows could be compared")
        return
    parts = [p for i in training if len(p := one_pass(rows, i))]
    judged = [m for i in judging if (m := by_table(exact[i], training, known) if i in exact else by_rows(rows, i, parts, training, known)) is not None]
    if not judged:
        yield NotChecked("train-val-overlap", "too few row fingerprints of the training loader were recorded")
    for one in judged:
        error = sigmas * float(np.sqrt(max(one.chance * (1 - one.chance), 1e-4) / one.rows))
        own = one_pass(rows, one.loader)
        copies = oversampled(parts[0], own) if parts and len(own) else None
        if one.hits < min_rows or (one.overlap - one.chance < max(share, error) and copies is None):
            continue
        verdict = meant(window, one.loader, training)
        if verdict in ("train", "same"):
            continue
        loud = verdict == "validation" or not (one.inside or one.covers)
        at = split_line(window, known[one.loader])
        yield Finding(
            "train-val-overlap", "certain" if loud else "suspected",
            "harmful" if loud and (one.overlap - one.chance >= harmful or copies is not None) else "note",
            f"{one.hits} of {one.rows} validation rows ({one.overlap:.0%}) are also training rows" + (", copies made before the split" if copies is not None else ""),
            "Split once into disjoint indices (seeded generator, before copying or oversampling rows) and build both sets from them.",
            Where.at(at, also=(str(known[one.loader].at),) if known[one.loader].at is not None and known[one.loader].at != at else ()),
            evidence=(Evidence(f"{one.hits} of {one.rows} validation rows have the fingerprint of one of the {one.seen} training rows looked at; by chance "
                               f"{one.chance:.1%} would (different training rows that are equal)", "rows/hash", one.overlap, one.chance + max(share, error), one.rows),
                      *((Evidence(f"{copies[1]:.0%} of the repeated training rows have label {copies[0]}", "rows/label", copies[1], 0.9, len(parts[0])),)
                        if copies is not None else ())))
        return


@dataclass(frozen=True, slots=True)
class Met:
    """How the rows of a loader meet the training rows. ``inside``: all are training rows, as far as those were looked at; ``covers``: all training rows are among them."""

    loader: int
    rows: int
    hits: int
    chance: float
    seen: int
    inside: bool
    covers: bool

    @property
    def overlap(self) -> float:
        return self.hits / max(self.rows, 1)


def size(known: dict[int, Fact], training: list[int]) -> float:
    return float(sum({known[t].get("same_data") or -t: float(known[t].get("rows") or 0) for t in training}.values()))


def by_table(fact: Fact, training: list[int], known: dict[int, Fact]) -> Met | None:
    """From the comparison of both data sets in the forked copy."""
    own, n, seen = fact.get("overlap") or {}, int(number(fact.data, "judged_rows")), int(number(fact.data, "train_rows"))
    if n < 1:
        return None
    copied = number(own, "measured") >= 3  # measured quantities: equal rows are copies, whatever the training set holds of its own
    hits = int(number(own, "hits"))
    return Met(int(fact["loader"]), n, hits, 0.0 if copied else number(own, "chance"), seen, hits >= 0.9 * n * min(1.0, seen / max(size(known, training), 1.0)), hits >= 0.9 * seen)


def by_rows(rows: np.ndarray, index: int, parts: list[np.ndarray], training: list[int], known: dict[int, Fact]) -> Met | None:
    """From the fingerprints of the batches that were served."""
    own = one_pass(rows, index)
    seen = np.unique(np.concatenate([rows[rows["loader"] == i]["hash"] for i in training]))
    chance = coincidence(parts, len(seen))
    if chance is None:
        return None
    hits = int(np.isin(own["hash"], seen).sum())
    return Met(index, len(own), hits, chance, len(seen), hits >= 0.9 * len(own) * min(1.0, len(seen) / max(size(known, training), 1.0)), bool(np.isin(seen, own["hash"]).mean() >= 0.9))


def one_pass(rows: np.ndarray, loader: int) -> np.ndarray:
    """Rows of the longest recorded pass of a loader."""
    own = rows[rows["loader"] == loader]
    passes, counts = np.unique(own["pass_"], return_counts=True)
    chosen: np.ndarray = own[own["pass_"] == passes[int(np.argmax(counts))]] if len(passes) else own
    return chosen


def coincidence(parts: list[np.ndarray], size: int, least: int = 40) -> float | None:
    """How often different training rows are equal: one half of a pass against the other, scaled to ``size`` rows to meet."""
    shares = []
    for part in parts:
        hashes = part["hash"][np.argsort(part["position"])]
        if len(hashes) >= least:
            a, b = hashes[::2], hashes[1::2]
            shares.append(min(1.0, float(np.isin(b, a).mean()) * max(1.0, size / len(a))))
    return max(shares, default=None)


def oversampled(train: np.ndarray, val: np.ndarray) -> tuple[int, float] | None:
    """(label, share) when nearly all repeated training rows carry one label that is not that common in validation: copies of a minority."""
    _, inverse, counts = np.unique(train["hash"], return_inverse=True, return_counts=True)
    repeated = train["label"][counts[inverse] > 1]
    if len(repeated) < 20 or (repeated < 0).any() or len(np.unique(train["label"])) < 2:
        return None
    labels, n = np.unique(repeated, return_counts=True)
    top = int(labels[int(np.argmax(n))])
    share = float(n.max() / n.sum())
    rest = train["label"] != top
    clean = float((counts[inverse] > 1)[rest].mean()) < 0.02 if rest.any() else False
    return (top, share) if share > 0.95 and clean and np.isin(val["hash"], train["hash"]).mean() > 0.02 else None


def split_line(window: Window, loader: Fact) -> Location | None:
    """A call that splits, in the statement that made the set or right above; else that statement."""
    at = dataset_line(window, loader)
    module = tree(window, at.file) if at is not None else None
    splits = [c.lineno for c in calls(module, "random_split", "train_test_split", "randperm", "permutation", "split")]
    near = [n for n in splits if at is not None and 0 <= at.line - n <= 3]
    return Location(at.file, max(near)) if at is not None and near else at


def whole_graph(window: Window) -> Finding | None:
    """A training mask is defined and used, but not on the way to the training loss."""
    for criterion in window.facts("criterion"):
        at = criterion.at
        if at is None or criterion.get("phase") not in (0, "train"):
            continue
        module, statements = tree(window, at.file), below_function(around(window, at))
        if module is None or not statements:
            continue
        names = bound(module)
        mask = next((n for n in sorted(names) if TRAIN_MASK.match(n)), None)
        if mask is None or not any(OTHER_MASK.match(n) for n in names):
            continue
        flow, queue = set(), set(words(statements[-1]))
        loops = [s for s in statements if isinstance(s, ast.For)]  # batches come from the loader that the loop runs over
        scope = [s for s in ast.walk(module) if isinstance(s, ast.stmt) and targets(s) and not isinstance(s, ast.For)]
        for _ in range(6):
            flow |= queue
            queue = ({w for s in scope if targets(s) & flow for w in words(s)} | {w for s in loops if targets(s) & flow for w in words(s.iter)}) - flow
        if mask in flow or any(origin(window, at, w) is None and TRAIN_MASK.match(w) for w in flow):
            continue
        n = ((criterion.get("input") or {}).get("shape") or [0])[0]
        return Finding(
            "train-val-overlap", "suspected", "harmful", f"The training loss runs over all {n} rows; {mask} has no part in it",
            f"Index outputs and targets with {mask} in the loss.", Where.at(at),
            evidence=(Evidence(f"{mask} is defined next to masks for validation, and nothing that flows into the loss at line {at.line} uses it", "source",
                               None, None, int(criterion.get("calls") or 1)),))
    return None


def tensors(window: Window, share: float, harmful: float, min_rows: int) -> Finding | None:
    """Without loaders: rows of the tensors that are validated on, against those that are trained on."""
    for fact in tables(window):
        own = fact.get("overlap") or {}
        hit, chance, n = number(own, "share"), number(own, "chance"), int(number(fact.data, "judged_rows"))
        common = fact.get("common") or {}
        name = max((k for k in common if said(k) == "validation" or VALIDATION_NAME.search(k)), key=lambda k: float(common[k]), default=None)
        between = fact.get("between")
        told = between is not None and (said(between[1]) == "validation" or bool(VALIDATION_NAME.search(between[1])))
        if name is not None and (float(common[name]) > hit or (between is not None and not told)):
            hit = float(common[name])  # what was compared row by row bears no name, or another
        chance = 0.0 if number(own, "measured") >= 3 else chance
        if fact.get("source") != "tensors" or hit - chance < max(share, 4 * float(np.sqrt(max(chance * (1 - chance), 1e-4) / max(n, 20)))) or hit * max(n, min_rows) < min_rows:
            continue
        if between is not None and told and (name is None or float(common[name]) < hit):
            name = between[1]
        if name is None:
            continue  # rows that nothing names for validation: a figure over training rows, or over all of them
        made, here = defined(window, name), sites(window)
        if made is not None and on_a_grid(made[1]):
            continue
        line = cut_line(window, name) or (Location(here[-1].file, here[-1].line) if here else None)
        return Finding(
            "train-val-overlap", "certain", "harmful" if hit - chance >= harmful else "note", f"{hit:.0%} of the validation rows are also training rows",
            "Split once into disjoint indices (seeded generator, before copying or oversampling rows) and build both sets from them.", Where.at(line),
            evidence=(Evidence(f"{hit:.0%} of the rows of {name} have the fingerprint of a training row; by chance {chance:.1%} would", "experiment/table", hit, chance + share, n),))
    return None


def drawn_again(window: Window) -> Finding | None:
    """Rows are divided anew in every epoch of one training: after some epochs all have been trained on."""
    for site in sites(window):
        if not site.in_epochs or site.drawn is None:
            continue
        module = tree(window, site.file)
        loop = next((n for n in ast.walk(module) if isinstance(n, ast.For | ast.While) and n.lineno < site.drawn <= (n.end_lineno or 0)
                     and trains(n) and any(isinstance(m, ast.For | ast.While | ast.With) for m in n.body)), None) if module is not None else None
        if loop is None or not two_sides(loop, site.drawn):
            continue
        return Finding(
            "train-val-overlap", "certain", "harmful", "The rows are divided anew in every epoch", "Divide once, before the loop.", Where.at(Location(site.file, site.drawn)),
            evidence=(Evidence(f"line {site.drawn} draws inside the training loop that begins at line {loop.lineno}; what is validated on now was trained on before", "source", None, None, 1),))
    return None


def two_sides(loop: ast.For | ast.While, line: int) -> bool:
    """The permutation of the epoch is cut in two complementary pieces, one of which is not trained on."""
    drawn = next((t for s in ast.walk(loop) if isinstance(s, ast.Assign) and s.lineno == line for t in targets(s)), None)
    cuts = [n for n in ast.walk(loop) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice) and root(n.value) == drawn]
    heads = {ast.unparse(c.slice.upper) for c in cuts if isinstance(c.slice, ast.Slice) and c.slice.lower is None and c.slice.upper is not None}
    tails = {ast.unparse(c.slice.lower) for c in cuts if isinstance(c.slice, ast.Slice) and c.slice.upper is None and c.slice.lower is not None}
    return bool(heads & tails) or any(isinstance(s, ast.Assign) and s.lineno == line and any(True for _ in calls(s.value, "random_split", "train_test_split")) for s in ast.walk(loop))
