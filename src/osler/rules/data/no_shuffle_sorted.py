from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import TRAIN, dataset_argument, loaders, roles
from osler.rules.script import assignment, dotted, place

BUFFER = re.compile(r"buf|shuffle|pool|window|reservoir", re.I)
OWN_ORDER = re.compile(r"weighted|balanced|class|episod|group|bucket|pk|batchsampler|distributed", re.I)


@rule("no-shuffle-sorted", "data")
def check(window: Window, *, purity: float = 0.5, min_batches: int = 8, min_batch: int = 4) -> Iterator[Finding | NotChecked]:
    """Consecutive training batches hold one class.

    **What it is.** Rows come sorted by label and the loader does not shuffle, or shuffles in a buffer too small to mix them.

    **How it is seen.** Entropy of the labels within a batch, against that of random batches of the same size from the same labels
    (drawn 200 times): the mean is below `purity` of it, over `min_batches` batches or more of at least `min_batch` rows. That holds for
    few classes and small batches too, because the comparison does.

    **Why it matters.** The model learns one class and forgets the last one; batch norm sees one class at a time.

    **What to do.** `shuffle=True`; for streams a buffer larger than the longest run of one class, or shuffled shards.

    **When this is wrong.** Samplers that build batches by class on purpose (episodes, balanced pairs) are left out.

    **Source.** webdataset and tf.data guides on shuffle buffers.
    """
    role, batches, rows = roles(window), window.stream("batches"), window.stream("rows")
    for index, loader in loaders(window).items():
        if role.get(index) != TRAIN or OWN_ORDER.search(str(loader.get("sampler") or "")):
            continue
        own = batches[(batches["loader"] == index) & np.isfinite(batches["label_entropy"]) & (batches["size"] >= min_batch)]
        if len(own) < min_batches:
            continue
        labels = rows[(rows["loader"] == index) & (rows["label"] >= 0)]["label"]
        if len(labels) < 2 * min_batch:
            yield NotChecked("no-shuffle-sorted", "no labels of rows were recorded for the training loader")
            continue
        if len(np.unique(labels)) == 1:
            found_one = one_class(window, loader, own, labels)
            if found_one is not None:
                yield found_one
            continue
        size = int(np.median(own["size"]))
        random, several = expected(labels.astype(np.int64), size)
        found = float(np.mean(own["label_entropy"]))
        if not several or random < 0.1 or found >= purity * random:
            continue
        at, hint = cause(window, loader)
        yield Finding(
            "no-shuffle-sorted", "measured", "harmful",
            f"Training batches hold {float(np.mean(own['classes'])):.1f} classes on average; random ones of the same rows are {random / max(found, 1e-3):.2g} times as mixed",
            hint, Where.at(at, also=(str(loader.at),) if loader.at is not None and at != loader.at else ()), first_step=int(own["step"][0]),
            last_step=int(own["step"][-1]),
            evidence=(Evidence(f"label entropy per batch of {size}: {found:.2f} nat; random batches of these labels have {random:.2f}",
                               "batches/label_entropy", found, purity * random, len(own)),), treatment="shuffle")


def one_class(window: Window, loader: Fact, batches: np.ndarray, labels: npt.NDArray[np.int32], least: int = 100) -> Finding | None:
    """Every row looked at, at the head of unshuffled passes, has the same label, while the model tells three or more classes apart."""
    shapes = [list((f.get("input") or {}).get("shape") or []) for f in window.facts("criterion") if "cross_entropy" in str(f.get("function"))]
    classes = max((int(s[1]) for s in shapes if len(s) >= 2), default=0)
    if loader.get("shuffle") is not False or classes < 3 or len(labels) < least or not (batches["label_entropy"] <= 1e-6).all():
        return None
    at, hint = cause(window, loader)
    return Finding(
        "no-shuffle-sorted", "suspected", "harmful", f"The first batches of every pass hold one class out of {classes}, and the loader does not shuffle", hint,
        Where.at(at), first_step=int(batches["step"][0]), last_step=int(batches["step"][-1]),
        evidence=(Evidence(f"all {len(labels)} rows looked at in {len(batches)} batches have label {int(labels[0])}", "batches/label_entropy", 0.0, None,
                           len(batches)),), treatment="shuffle")


def expected(labels: npt.NDArray[np.int64], size: int, draws: int = 200) -> tuple[float, bool]:
    """Mean label entropy of random batches, in nat, and whether there is more than one class."""
    kinds, codes = np.unique(labels, return_inverse=True)
    generator = np.random.default_rng(0)
    total = 0.0
    for _ in range(draws):
        share = np.bincount(codes[generator.integers(0, len(codes), size)], minlength=len(kinds)) / size
        share = share[share > 0]
        total -= float((share * np.log(share)).sum())
    return total / draws, len(kinds) > 1


def cause(window: Window, loader: Fact) -> tuple[Location | None, str]:
    """The line to change: the buffer's size where one is given, else the loader."""
    argument = dataset_argument(window, loader)
    at = loader.at
    if at is not None and argument is not None:
        nodes: list[ast.AST] = list(ast.walk(argument))
        name = dotted(argument)
        made = assignment(window, at.file, name, at.line) if name else None
        nodes += list(ast.walk(made)) if made is not None else []
        for n in nodes:
            if isinstance(n, ast.Name) and BUFFER.search(n.id):
                found = assignment(window, at.file, n.id, n.lineno)
                if found is not None:
                    return Location(at.file, found.lineno), f"Enlarge {n.id}: the shuffle buffer is shorter than a run of one class."
        buffered = next((n for n in nodes if isinstance(n, ast.keyword) and n.arg and BUFFER.search(n.arg)), None)
        if buffered is not None:
            return Location(at.file, buffered.value.lineno), "Enlarge the shuffle buffer: it is shorter than a run of one class."
    if "iterable" in str(loader.get("dataset")).lower() or loader.get("rows") is None:
        return place(loader.get("dataset_at")) or at, "Mix the rows in the stream (shuffle the shards, larger buffer)."
    return at, "Pass shuffle=True to this loader."
