"""A fact is an event of the program with a code location: one line of ``facts.jsonl``.

The kinds and their fields are listed in ``docs/internals/facts.md``; a rule reads nothing else of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Location:
    """A place in code. ``file`` is an absolute path or one relative to the run's working directory; ``line`` is 1-based."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def to_json(self) -> list[Any]:
        return [self.file, self.line, self.function]

    @classmethod
    def from_json(cls, raw: Any) -> Location | None:
        """``None`` for anything that is no location (a torn or foreign record)."""
        if isinstance(raw, list | tuple) and len(raw) >= 2 and isinstance(raw[0], str) and isinstance(raw[1], int):
            return cls(raw[0], raw[1], str(raw[2]) if len(raw) > 2 else "")
        return None


@dataclass(frozen=True, slots=True)
class Fact:
    """One recorded event.

    Attributes:
        kind: what happened, see ``docs/internals/facts.md``.
        step: number of optimizer steps completed when it happened (0 = before the first step).
        t: seconds since the watcher was attached.
        at: innermost code line of the user's own files, or ``None`` where there is none.
        data: the fields of this kind.
        lib: innermost library line as ``file:line`` where the user line is only a framework's entry point.
    """

    kind: str
    step: int
    t: float
    at: Location | None = None
    data: dict[str, Any] = field(default_factory=dict)
    lib: str | None = None

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": self.kind, "step": self.step, "t": round(self.t, 6)}
        if self.at is not None:
            row["at"] = self.at.to_json()
        if self.lib is not None:
            row["lib"] = self.lib
        row["data"] = self.data
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Fact:
        return cls(str(row["kind"]), int(row.get("step", 0)), float(row.get("t", 0.0)), Location.from_json(row.get("at")),
                   dict(row.get("data") or {}), row.get("lib"))
