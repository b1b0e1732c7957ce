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
from osler.rules.script import FUNCTIONS, LOOPS, around, below_function, call_name, calls, function_around
from osler.rules.stack_questions import Row
from osler.rules.throughput.loading import experiment, loading, names_at, per_item, training_loader

READS = re.compile(r"^(read_\w+|load|loads|loadtxt|genfromtxt|open|imread|safe_load|fromfile|read|readlines|read_text|reader|DictReader|load_\w+|memmap|iterrows|parse|unpickle|decompress)$")
COMPUTES = re.compile(r"^(sort|sorted|argsort|unique|fft\w*|rfft\w*|stft|spectrogram|melspectrogram|resize|interpolate|sub|findall|split|tokenize|encode|decode|deepcopy|median|quantile|cdist|svd|eig\w*|"
                      r"inv|solve|lstsq|convolve|filter|gaussian_filter|rotate|zoom|histogram|corrcoef|std|mean|normalize|query|merge|groupby|isin|where)$")
Hot = tuple[Location, float, list[Row]]


@rule("slow-dataset", "throughput")
def check(window: Window, *, share: float = 0.3, note: float = 0.15, item: float = 1.2e-4) -> Iterator[Finding | NotChecked]:
    """The dataset does expensive work again and again.

    **What it is.** `__getitem__` (or the collate function) reads and parses a file, decodes, sorts, tokenises or loops in Python for every item,
    though the result is the same in every epoch, or the same file holds all items.

    **How it is seen.** The stack of the training thread was looked at now and then: `share` of the time or more (a note from `note` on) went into the
    loader, working, and each row took `item` seconds or more. A forked copy fetched a few items twice: they came out equal and took as long
    again, or different items opened the same file. The line is the user's line most looks fell on.

    **Why it matters.** The model waits; an accelerator waits longer.

    **What to do.** Do the work once: open and parse in `__init__`, keep arrays or a memory map, cache by index, prepare the features before
    training; only what is random belongs into `__getitem__`.

    **When this is wrong.** Random augmentation must be done anew: where items differ from call to call and no file is read over and over, this is a note. Data sets too large
    for memory must be read again; workers then hide the cost.

    **Source.** facebookresearch/mmf issue 1166; Handbook B §5. Thresholds: effect size (three tenths of the time), and what a plain index into a tensor and
    collation cost (10 to 60 µs a row).
    """
    found = loading(window)
    if found is None:
        yield NotChecked("slow-dataset", "the run was too short for shares of time")
        return
    loader = training_loader(window)
    hot = found.hottest()
    workers = bool(loader is not None and loader.get("workers"))
    if found.share < note or found.samples < 8 or (found.idle > 0.6 and not workers):
        return
    took = per_item(window, loader)
    known = experiment(window, loader)
    if workers and loader is not None:
        yield from behind_workers(window, loader, known, found.share, share, item)
        return
    if not hot:
        return
    at, seconds, _rows = hot[0]
    inside = sum(h[1] for h in hot)
    size = int((loader.get("batch_size") if loader is not None else None) or 1)
    long = took is not None and took * size > 5e-3
    busy = min(1.0, found.cpu / max(found.seconds, 1e-9)) if long else 1.0  # a crowded machine makes long batches look longer
    lately = took * busy * inside / found.seconds if took is not None else None
    per_batch = "collate" in at.function
    if (lately is not None and lately < (item / 8 if per_batch else item)) or inside < 0.5 * found.seconds:
        return
    why, sure = reason(window, at, known, item)
    for other, part, _ in found.hottest(outer=True) if not sure else ():
        if part > 0.25 * inside and reason(window, other, known, item)[1]:
            at, seconds, (why, sure) = other, part, reason(window, other, known, item)
            break
    severity = "wasteful" if found.share >= share and sure else "note"
    text = f"{found.share:.0%} of {found.told.seconds:.1f} s went into the loader, {seconds / max(found.seconds, 1e-9):.0%} of that into this line"
    yield Finding(
        "slow-dataset", "measured", severity, f"The data set takes {found.share:.0%} of the time{f', {took * 1e3:.2g} ms a row' if took else ''}: {why}",
        f"Do it once, before training, and keep the result: {quoted(window, at, 'this line')}.",
        Where.at(at, also=tuple(str(h[0]) for h in hot[1:3] if h[1] > 0.15 * inside)),
        evidence=(Evidence(text, "time", found.share, share, found.samples), *repeated(known)))


def place(window: Window, inner: list[Hot], outer: list[Hot]) -> Hot:
    """The line to change: the hottest innermost one where it reads or computes, else the hottest of the function that the loader calls."""
    names = names_at(window, inner[0][0])
    return inner[0] if any(READS.match(n) or COMPUTES.match(n) for n in names) or inner[0][1] > 0.8 * outer[0][1] else outer[0]


def reason(window: Window, at: Location, known: dict[str, Any], item: float) -> tuple[str, bool]:
    """Why the work is done again and again, and whether that is plain."""
    files = [set(f) for f in known.get("files") or () if f]
    if len(files) >= 2 and files[0] & files[1]:
        return "every item opens the same file again", True
    names = names_at(window, at)
    again = list(known.get("again") or ())
    random = bool(known.get("random")) or known.get("same") is not True
    if known and not random and again and max(again) >= 0.7 * item:
        return ("every item is read again in every epoch" if any(READS.match(n) for n in names) or files else "every item is computed anew in every epoch, with the same result"), True
    if any(READS.match(n) for n in names):
        return "it reads and parses at every item", True
    if in_python_loop(window, at):
        return "it loops in Python at every item", True
    if any(COMPUTES.match(n) for n in names):
        return "it computes at every item", not random or not known
    return "its items are expensive", False


def in_python_loop(window: Window, at: Location) -> bool:
    """The line is in a loop inside the item's function."""
    statements = around(window, at)
    if function_around(statements) is None:
        return False
    inner = below_function(statements)
    comprehension = any(isinstance(n, ast.ListComp | ast.GeneratorExp) for s in inner[-1:] for n in ast.walk(s))
    return comprehension or any(isinstance(s, LOOPS) for s in inner)


def repeated(known: dict[str, Any]) -> tuple[Evidence, ...]:
    again = list(known.get("again") or ())
    if known.get("same") is True and not known.get("random") and again:
        return (Evidence(f"in a copy, the same index gave the same item again after {max(again) * 1e3:.2g} ms more", "experiment", max(again), None, len(again)),)
    return ()


def behind_workers(window: Window, loader: Fact, known: dict[str, Any], part: float, share: float, item: float) -> Iterator[Finding]:
    """The work happens in workers; the copy's figures and the text tell."""
    took = [t for t in known.get("work") or () if isinstance(t, float)]
    files = [set(f) for f in known.get("files") or () if f]
    same = len(files) >= 2 and bool(files[0] & files[1])
    if part < share or not took or sorted(took)[len(took) // 2] < 10 * item or not (same or (known.get("same") is True and not known.get("random"))):
        return
    start = spot(loader.get("dataset_at"))
    at = expensive_line(window, start) or start or loader.at
    yield Finding(
        "slow-dataset", "measured", "wasteful", f"Training waits {part:.0%} of the time for workers: an item takes {max(took) * 1e3:.2g} ms",
        f"Do it once, before training, and keep the result: {quoted(window, at, 'the work in __getitem__')}.", Where.at(at),
        evidence=(Evidence(f"{part:.0%} of the time the training thread waited for the loader's workers", "time", part, share), *repeated(known)))


def expensive_line(window: Window, start: Location | None) -> Location | None:
    """In ``__getitem__``, the first line that reads or computes something known to be dear."""
    function = next((s for s in reversed(around(window, start)) if isinstance(s, FUNCTIONS)), None) if start is not None else None
    for pattern in (READS, COMPUTES):
        for call in calls(function):
            if pattern.match(call_name(call)) and start is not None:
                return Location(start.file, call.lineno, start.function)
    return None
