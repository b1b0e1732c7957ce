"""Which recorded processes trained together: gives each window the windows of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from osler.core.window import Window


def together(windows: Mapping[Any, Window]) -> dict[Any, Window]:
    """The same windows, those of one process group with each other as ``peers``.

    A group is known by where its members met and by their number; the same place may be used again later, so of several processes with one
    rank the one that joined at about the same time is taken.
    """
    groups = {key: joined for key, window in windows.items() if (joined := window.last("process-group")) is not None and int(joined.get("world") or 1) > 1}
    found = dict(windows)
    for key, mine in groups.items():
        nearest: dict[int, tuple[float, Window]] = {}
        for other, theirs in groups.items():
            same = (theirs.get("world"), theirs.get("meeting")) == (mine.get("world"), mine.get("meeting"))
            if not same or theirs.get("rank") == mine.get("rank"):
                continue
            gap = abs(float(theirs.get("clock") or 0) - float(mine.get("clock") or 0))
            rank = int(theirs.get("rank") or 0)
            if rank not in nearest or gap < nearest[rank][0]:
                nearest[rank] = (gap, windows[other])
        if nearest:
            found[key] = replace(windows[key], rank=int(mine.get("rank") or 0), peers=tuple(window for _, (_, window) in sorted(nearest.items())))
    return found
