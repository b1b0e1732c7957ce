from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.loaders import loaders
from osler.rules.throughput.loading import loading, training_loader


@rule("no-workers", "throughput")
def check(window: Window, *, share: float = 0.3, idle: float = 0.6) -> Iterator[Finding | NotChecked]:
    """The loader waits on latency with num_workers=0.

    **What it is.** Items come from a disk, a network or another process; the training thread itself waits for each of them, one after the
    other, although the processor has nothing to do.

    **How it is seen.** The stack of the training thread was looked at now and then: `share` of the time or more went into a loader
    without workers, and in `idle` of that time or more the thread used no processor (compared with the rest of the run, so that a busy machine
    does not look like a slow disk).

    **Why it matters.** Workers would wait side by side, and while the model computes.

    **What to do.** Give the DataLoader `num_workers` (start with 2 to 4), `persistent_workers=True` and, for an accelerator,
    `pin_memory=True`; or read ahead in a thread.

    **When this is wrong.** A data set that computes instead of waiting is slow-dataset; workers help there only where processors are idle.

    **Source.** Handbook B §5 (⚠ its "workers = 1.5 × cores" is for work, not for waiting); torch.utils.data documentation. Threshold: effect
    size, three tenths of the time.
    """
    found = loading(window)
    if found is None or not loaders(window):
        yield NotChecked("no-workers", "no loader, or the run was too short for shares of time")
        return
    loader = training_loader(window)
    if loader is None or loader.get("workers") or found.share < share or found.idle < idle or found.samples < 8:
        return
    hot = found.hottest()
    line = f"; it waits at {hot[0][0]}" if hot else ""
    yield Finding(
        "no-workers", "measured", "wasteful", f"{found.share:.0%} of the time training waits for a loader without workers",
        f"Give the loader workers: num_workers=4, persistent_workers=True in {quoted(window, loader.at, 'the DataLoader')}.",
        Where.at(loader.at, also=tuple(str(h[0]) for h in hot[:1])),
        evidence=(Evidence(f"in {found.idle:.0%} of the loader's {found.seconds:.1f} s the processor had nothing to do{line}", "time", found.share, share, found.samples),),
        treatment="workers", explains=("slow-dataset",))
