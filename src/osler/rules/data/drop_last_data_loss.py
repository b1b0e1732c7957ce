from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import SAYS_TRAIN, SAYS_VALIDATION, VALIDATION, loader_name, loaders, roles


@rule("drop-last-data-loss", "data")
def check(window: Window, *, fixed_share: float = 0.2, random_share: float = 0.4, note_share: float = 0.1) -> Iterator[Finding]:
    """`drop_last` removes a large part of the rows, or all of them.

    **What it is.** A loader drops its last, incomplete batch. When the data set is smaller than a batch there is no other batch,
    and the loop over it never runs; when it is barely larger, much of the data is never seen.

    **How it is seen.** Rows, batch size and `drop_last` of the loader: no batch at all is certain. A share of `fixed_share` of the
    rows lost in a fixed order (the same ones every time, or rows a metric should count) or `random_share` in random order is
    harmful; `note_share` is a note.

    **Why it matters.** No batch means no training, without any error.

    **What to do.** `drop_last=False`, or a smaller batch.

    **When this is wrong.** Losing a random remainder of a few rows per epoch is what `drop_last` is for.

    **Source.** tabnet issue 537.
    """
    role = roles(window)
    for index, loader in loaders(window).items():
        rows, size = loader.get("rows"), loader.get("batch_size")
        if not loader.get("drop_last") or not isinstance(rows, int) or not isinstance(size, int) or rows <= 0 or size <= 0:
            continue
        if isinstance(loader.get("replicas"), int) and loader["replicas"] > 1:
            rows = -(-rows // int(loader["replicas"]))  # a distributed sampler serves each rank its part
        length = loader.get("length")
        batches = length if isinstance(length, int) else rows // size
        kept = min(rows, batches * size)
        lost = 1 - kept / rows
        if batches == 0:
            used = used_for_training(window, loader)
            yield finding(loader, "certain", "fatal" if used and window.n_steps == 0 else "harmful",
                          f"The loader yields no batch: {rows} rows, batch size {size}, drop_last=True", rows, size, lost, fixed_share)
            continue
        judged = role.get(index) == VALIDATION
        fixed = judged or loader.get("shuffle") is False
        level = "harmful" if lost >= (fixed_share if fixed else random_share) else "note" if lost >= note_share else None
        if level is not None and index in role:
            yield finding(loader, "certain", level, f"drop_last removes {rows - kept} of {rows} rows ({lost:.0%}) from every pass"
                          + (" of the evaluation" if judged else ", always the same ones" if fixed else ""), rows, size, lost,
                          fixed_share if fixed else random_share)


def used_for_training(window: Window, loader: Fact) -> bool:
    name = loader_name(window, loader)
    return bool(SAYS_TRAIN.search(name)) or not SAYS_VALIDATION.search(name)


def finding(loader: Fact, certainty: str, severity: str, title: str, rows: int, size: int, lost: float, limit: float) -> Finding:
    return Finding(
        "drop-last-data-loss", certainty, severity, title, f"Use drop_last=False, or a batch size below {max(rows, 1)}.", Where.at(loader.at),
        first_step=0, evidence=(Evidence(f"{rows} rows in batches of {size}: {rows // size} full batches, {lost:.0%} of the rows dropped", "loader", lost,
                                         limit, rows),), treatment="keep-last")
