"""A read-only slice of everything recorded about one process: streams, facts, traces, sources.

All rules and views see only this, whether it comes from a live store, a finished run, or a foreign log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from osler.core.facts import Fact
from osler.core.signals import STREAMS
from osler.core.trace import Trace


@dataclass(frozen=True, slots=True)
class End:
    """How the process ended. ``code`` is the exit code, ``signal`` the name of the signal that killed it."""

    code: int | None
    signal: str | None = None
    seconds: float | None = None
    out_of_memory: bool = False


@dataclass(frozen=True)
class Window:
    """What a rule sees.

    Attributes:
        run: contents of ``run.json`` (command, working directory, versions).
        streams: name to structured array, see ``osler.core.signals``.
        all_facts: facts in time order.
        traces: recorded program traces in time order.
        sources: text of the user's own files, by the path used in locations.
        end: how the process ended, ``None`` while it lives.
        rank: rank of the process.
        peers: windows of the other ranks of the same process group, by rank; they have no peers themselves.
    """

    run: Mapping[str, Any] = field(default_factory=dict)
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)
    all_facts: Sequence[Fact] = ()
    traces: Sequence[Trace] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    end: End | None = None
    rank: int = 0
    peers: Sequence[Window] = ()

    def stream(self, name: str) -> np.ndarray:
        """Rows of a declared stream; an empty array when nothing was recorded."""
        rows = self.streams.get(name)
        return rows if rows is not None else np.empty(0, STREAMS[name].dtype)

    @property
    def steps(self) -> np.ndarray:
        return self.stream("steps")

    @property
    def calls(self) -> np.ndarray:
        return self.stream("calls")

    @property
    def layers(self) -> np.ndarray:
        return self.stream("layers")

    def facts(self, kind: str) -> list[Fact]:
        return [f for f in self.all_facts if f.kind == kind]

    def last(self, kind: str) -> Fact | None:
        found = self.facts(kind)
        return found[-1] if found else None

    @property
    def final(self) -> bool:
        """Whether the process is over, so that "never happened" can be said."""
        return self.end is not None

    @property
    def n_steps(self) -> int:
        """Optimizer steps completed."""
        seen = int(self.steps["step"][-1]) if len(self.steps) else 0
        return max(seen, max((f.step for f in self.all_facts), default=0))

    def line(self, file: str, number: int) -> str:
        """Source text of a line, empty when the file was not kept."""
        lines = self.sources.get(file, "").splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""
