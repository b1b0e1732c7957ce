"""What both loader rules ask: how much of the time went into the loader, on which lines, and whether it worked or waited."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.loaders import TRAIN, loaders, roles
from osler.rules.script import around, call_name, calls
from osler.rules.stack_questions import Row, Times, header, step_line, times

FETCHES = re.compile(r"^(__getitem__|__getitems__|__iter__|__next__|\w*collate\w*|(get|load|fetch|read|next|make|sample|prepare)_?\w*|\w*_(loader|batches|generator|reader|stream))$")
WAITS = re.compile(r"\b(sleep|requests|urlopen|urlretrieve|socket|recv|aiohttp|http|boto3|s3|redis|wait|acquire)\b", re.I)


@dataclass(frozen=True, slots=True)
class Loading:
    """The training thread inside loaders.

    Attributes:
        rows: stacks that end there.
        seconds, cpu: of them together; ``elsewhere`` the ratio of processor time to wall time of everything else.
    """

    told: Times
    rows: tuple[Row, ...]
    seconds: float
    cpu: float
    elsewhere: float

    @property
    def share(self) -> float:
        return self.told.share(self.seconds)

    @property
    def idle(self) -> float:
        """Share of the loader's time in which the thread did not work, judged by how much the rest of the run works."""
        return max(0.0, 1.0 - self.cpu / max(self.seconds * self.elsewhere, 1e-9))

    @property
    def samples(self) -> int:
        return sum(r.samples for r in self.rows)

    def hottest(self, outer: bool = False) -> list[tuple[Location, float, list[Row]]]:
        """The user's lines that the loader spent its time on, most first: the innermost ones or (``outer``) those of the function that
        the loader calls. The line of the loop itself (collation, workers) is left out."""
        found: dict[Location, list[Row]] = {}
        for row in self.rows:
            if len(row.stack) > 1:
                place = next((f for f in reversed(row.stack[:-1]) if not f.function.startswith("<")), row.stack[0]) if outer else row.stack[0]
                found.setdefault(place, []).append(row)
        return sorted(((at, sum(r.seconds for r in rows), rows) for at, rows in found.items()), key=lambda item: -item[1])


def loading(window: Window) -> Loading | None:
    told = times(window)
    if told is None:
        return None
    rows = [r for r in told.rows if r.kind == "loader"]
    if not loaders(window) or not rows:
        rows += [r for r in told.rows if r.kind is None and by_hand(window, r)]
    seconds, cpu = sum(r.seconds for r in rows), sum(r.cpu for r in rows)
    rest = max(told.seconds - seconds, 0.0)
    elsewhere = min(1.0, (told.cpu - cpu) / rest) if rest > 0.02 * told.seconds else min(1.0, told.cpu / max(told.seconds, 1e-9))
    return Loading(told, tuple(rows), seconds, cpu, max(elsewhere, 0.25) if rest > 0.02 * told.seconds else 0.7)


def by_hand(window: Window, row: Row) -> bool:
    """Batches that a function of the user's makes in the loop, without a DataLoader."""
    if len(row.stack) < 2:
        return False
    at = step_line(window, row.stack)
    head = None if at is not None else loop_head(window, row.stack)
    place = at or head
    inner = row.stack[: row.stack.index(place)] if place is not None else ()
    return any(FETCHES.match(f.function) for f in inner) and not any(f.function in ("forward", "loss") for f in inner)


def loop_head(window: Window, stack: tuple[Location, ...]) -> Location | None:
    """The head of a loop that a stack passes through: `for x, y in batches():`."""
    for frame in stack[1:]:
        statements = around(window, frame)
        if statements and isinstance(statements[-1], ast.For) and frame.line <= statements[-1].body[0].lineno - 1:
            return frame
    return None


def training_loader(window: Window) -> Fact | None:
    """The loader that training reads; the first one where its role cannot be told."""
    known, role = loaders(window), roles(window)
    chosen = [f for i, f in known.items() if role.get(i) == TRAIN] or list(known.values())
    return chosen[0] if chosen else None


def per_item(window: Window, loader: Fact | None) -> float | None:
    """Seconds a row of the training loader's batches took."""
    rows = window.stream("batches")
    if loader is not None:
        rows = rows[rows["loader"] == loader["index"]]
    rows = rows[np.isfinite(rows["wait"]) & (rows["size"] > 0)]
    return float(np.median(rows["wait"] / rows["size"])) if len(rows) >= 3 else None


def experiment(window: Window, loader: Fact | None) -> dict[str, Any]:
    """The experiment on items of that loader."""
    for fact in window.facts("experiment"):
        if fact.get("name") == "item-repeat" and loader is not None and fact.get("loader") == loader["index"]:
            return dict(fact.data)
    return {}


def names_at(window: Window, at: Location) -> set[str]:
    """Names of what a line calls."""
    statements = around(window, at)
    return {call_name(c) for part in (header(statements[-1]) if statements else ()) for c in calls(part)}
