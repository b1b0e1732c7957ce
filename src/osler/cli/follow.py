"""Follows one run folder while it is written: reads what is new, diagnoses, remembers what has been said already.

Shared by the supervisor and the sidecar. Nothing heavy is imported before there is something to diagnose, and the engine
gets at most some 5 % of a core.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osler.core.finding import LOUD, SEVERITIES, Evidence, Finding

if TYPE_CHECKING:
    from osler.core.window import End, Window
    from osler.diagnose.engine import Verdict

PAUSE = 0.5
"""Seconds between two looks at the least."""
SHARE = 20
"""The next look comes no sooner than this many times the duration of the last one..."""
NEWS = 2.0
"""...but new facts wait no longer than so many seconds."""
PATIENCE = 3
"""Failures of the engine in a row after which only the final diagnosis is tried."""


class Follower:
    """``tick`` often; ``last_word`` once, when the process is over.

    Attributes:
        windows: newest window by rank and attempt; a later process of the same rank (a script run twice, an elastic
            restart) is a further attempt.
        verdict: newest verdict over all of them, ``None`` before the first.
        end: how the run ended, for windows that do not know (``end.json`` could not be written, or nobody wrote it).
    """

    def __init__(self, directory: Path, overrides: Mapping[str, Any], start: Path, tell: Callable[[str], None]) -> None:
        self.directory = directory
        self.windows: dict[tuple[int, int], Window] = {}
        self._verdicts: dict[tuple[int, int], tuple[Any, Verdict]] = {}
        self.verdict: Verdict | None = None
        self.end: End | None = None
        self._overrides = overrides
        self._start = start
        self._tell = tell
        self._config: Any = None
        self._reader: Any = None
        self._said: set[Any] = set()
        self._before: set[Any] = set()
        self._sizes: dict[str, int] = {}
        self._ended = -1e9
        self._cost = 0.0
        self._failures = 0

    def tick(self) -> list[Finding]:
        """Look if it is time to; the findings of severity harmful or worse that are to be said now."""
        if self._failures >= PATIENCE:
            return []
        now = time.monotonic()
        if now - self._ended < PAUSE:
            return []
        sizes = self._measure()
        if not sizes or sizes == self._sizes:
            return []
        news = any(size != self._sizes.get(path) for path, size in sizes.items() if path.endswith("facts.jsonl"))
        gap = self._cost * SHARE
        if now - self._ended < (min(gap, NEWS) if news else gap):
            return []
        self._sizes = sizes
        try:
            self._look()
            self._failures = 0
            return self._news()
        except Exception:
            self._failures += 1
            self.trouble("diagnosing the run so far failed")
            return []
        finally:
            self._ended = time.monotonic()
            self._cost = self._ended - now

    def last_word(self) -> None:
        """The final diagnosis of every rank, with how the process ended. Raises what the engine raises."""
        self._look()

    @property
    def primary(self) -> Window | None:
        """The window that a report is about: of the lowest rank the latest attempt."""
        first = min((rank for rank, _ in self.windows), default=None)
        return self.windows[max(process for process in self.windows if process[0] == first)] if first is not None else None

    def trouble(self, text: str) -> None:
        """Keep the traceback in ``osler.log`` and say one line, the first time. Call it inside ``except``."""
        first = not (self.directory / "osler.log").exists()
        try:
            with open(self.directory / "osler.log", "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n{traceback.format_exc()}\n")
        except OSError:
            pass
        if first:
            self._tell(f"osler: {text}; the run goes on. Details: {self.directory / 'osler.log'}")

    def _measure(self) -> dict[str, int]:
        """Size of every file that training processes wrote."""
        sizes: dict[str, int] = {}
        try:
            for folder in os.scandir(self.directory):
                if folder.name.startswith("rank-"):
                    sizes.update((entry.path, entry.stat().st_size) for entry in os.scandir(folder.path))
        except OSError:
            pass  # a file that is just being renamed: next time
        return sizes

    def _look(self) -> None:
        from osler.diagnose import engine, ranks
        from osler.store.reader import RunReader

        if self._config is None:
            self._config = self._configure()
        if self._reader is None:
            self._reader = RunReader(self.directory)
        sizes = self._measure()
        self._reader.refresh()
        windows = {(rank, attempt): self._reader.window(rank, attempt)
                   for rank in self._reader.ranks() for attempt in range(1, self._reader.attempts(rank) + 1)}
        self.windows = ranks.together({process: w if w.final else replace(w, end=self.end) for process, w in windows.items()})
        for (rank, attempt), window in self.windows.items():
            folder = os.sep + f"rank-{rank:04d}" + (f".attempt-{attempt}" if attempt > 1 else "") + os.sep
            state = (window.final, {path: size for path, size in sizes.items() if folder in path or window.peers})
            if self._verdicts.get((rank, attempt), (None,))[0] != state:  # a process long over is not judged again
                self._verdicts[rank, attempt] = (state, engine.diagnose(window, self._config))
        if self.windows:
            self.verdict = merged({process: self._verdicts[process][1] for process in self.windows})

    def _configure(self) -> Any:
        from osler.core.errors import UsageError
        from osler.diagnose import config

        try:
            return config.load(self._start, self._overrides)
        except UsageError as problem:  # too late to refuse: the script runs
            self._tell(f"osler: {problem} (ignored)")
            return config.Config()

    def _news(self) -> list[Finding]:
        """What is new. A certain finding is said at once, others when two looks in a row agree."""
        assert self.verdict is not None or not self.windows
        loud = [f for f in (self.verdict.findings if self.verdict else ()) if f.severity in LOUD and f.explained_by is None]
        fresh = [f for f in loud if f.key not in self._said and (f.certainty == "certain" or f.key in self._before)]
        self._before = {f.key for f in loud}
        self._said |= {f.key for f in fresh}
        return fresh


def merged(verdicts: Mapping[tuple[int, int], Verdict]) -> Verdict:
    """One verdict over all processes, by rank and attempt; where there are several ranks, a finding says which show it."""
    from osler.diagnose import engine

    if len(verdicts) == 1:
        return next(iter(verdicts.values()))
    whole = engine.merge([verdicts[process] for process in sorted(verdicts)])
    total = len({rank for rank, _ in verdicts})
    if total == 1:
        return whole
    places: dict[Any, set[int]] = {}
    for (rank, _), verdict in verdicts.items():
        for finding in verdict.findings:
            places.setdefault(finding.key, set()).add(rank)

    def tell_ranks(finding: Finding) -> Finding:
        ranks = sorted(places.get(finding.key, ()))
        if not ranks:
            return finding
        names = f"all {total} ranks" if len(ranks) == total else f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of {total}"
        where = finding.where if finding.where.rank is not None else replace(finding.where, rank=ranks[0])
        return finding.replace(where=where, evidence=(*finding.evidence, Evidence(f"seen on {names}", samples=total)))

    return replace(whole, findings=tuple(map(tell_ranks, whole.findings)))


def listed(numbers: list[int]) -> str:
    """``0, 1, 5``, cut where it gets long."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def reaches(severity: str, threshold: str | None) -> bool:
    """Whether a severity is as loud as the threshold or louder."""
    return threshold is not None and SEVERITIES.index(severity) <= SEVERITIES.index(threshold)
