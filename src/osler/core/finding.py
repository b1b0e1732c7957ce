"""Findings, and their form on the wire (schema 1; readers accept this schema and the one before)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from osler.core.facts import Location

SCHEMA = 1
CERTAINTIES = ("certain", "measured", "suspected")
SEVERITIES = ("fatal", "harmful", "wasteful", "note")
LOUD = frozenset({"fatal", "harmful"})


@dataclass(frozen=True, slots=True)
class Where:
    """What the finding points at. ``also`` are other lines that take part in it."""

    file: str | None = None
    line: int | None = None
    module: str | None = None
    parameter: str | None = None
    rank: int | None = None
    columns: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    also: tuple[str, ...] = ()

    @classmethod
    def at(cls, location: Location | None, **more: Any) -> Where:
        return cls(location.file, location.line, **more) if location is not None else cls(**more)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "module": self.module, "parameter": self.parameter,
                "rank": self.rank, "columns": list(self.columns), "rows": list(self.rows), "also": list(self.also)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Where:
        return cls(raw.get("file"), raw.get("line"), raw.get("module"), raw.get("parameter"), raw.get("rank"),
                   tuple(raw.get("columns") or ()), tuple(raw.get("rows") or ()), tuple(raw.get("also") or ()))


@dataclass(frozen=True, slots=True)
class Evidence:
    """One figure that carries the claim. ``samples`` is how many observations it rests on."""

    text: str
    signal: str | None = None
    value: float | None = None
    threshold: float | None = None
    samples: int | None = None

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"text": self.text, "signal": self.signal, "samples": self.samples}
        for key in ("value", "threshold"):
            number = getattr(self, key)
            finite = number is None or math.isfinite(number)
            row[key] = number if finite else None
            if not finite:
                row[key + "_text"] = str(number)
        return row

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Evidence:
        def number(key: str) -> float | None:
            text = raw.get(key + "_text")
            return float(text) if text is not None else raw.get(key)
        return cls(str(raw.get("text", "")), raw.get("signal"), number("value"), number("threshold"), raw.get("samples"))


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim with evidence.

    Attributes:
        cause: id from the catalogue, kebab-case.
        certainty: ``certain`` (a fact of the program), ``measured`` (a statistic with an effect size) or ``suspected``.
        severity: ``fatal`` (the run is lost), ``harmful`` (the result suffers), ``wasteful`` (time, memory, money), ``note``.
        title: the claim in one short sentence, with its figure.
        fix: the thing to change, as an instruction.
        explains: causes of other findings that this one folds under itself; ``explained_by`` the reverse.
    """

    cause: str
    certainty: str
    severity: str
    title: str
    fix: str
    where: Where = field(default_factory=Where)
    first_step: int | None = None
    last_step: int | None = None
    evidence: tuple[Evidence, ...] = ()
    treatment: str | None = None
    explains: tuple[str, ...] = ()
    explained_by: str | None = None
    confirmed: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.certainty not in CERTAINTIES or self.severity not in SEVERITIES:
            raise ValueError(f"{self.cause}: certainty {self.certainty!r} or severity {self.severity!r} is not one of "
                             f"{CERTAINTIES} / {SEVERITIES}")

    def replace(self, **changes: Any) -> Finding:
        return replace(self, **changes)

    @property
    def key(self) -> tuple[str, str | None, int | None, str | None]:
        """What makes two findings the same one at different moments of a run."""
        return (self.cause, self.where.file, self.where.line, self.where.module)

    def to_json(self) -> dict[str, Any]:
        return {"cause": self.cause, "certainty": self.certainty, "severity": self.severity, "title": self.title,
                "where": self.where.to_json(), "when": {"first_step": self.first_step, "last_step": self.last_step},
                "evidence": [e.to_json() for e in self.evidence], "explains": list(self.explains),
                "explained_by": self.explained_by, "fix": self.fix, "treatment": self.treatment,
                "confirmed": self.confirmed}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Finding:
        when = raw.get("when") or {}
        return cls(raw["cause"], raw["certainty"], raw["severity"], raw.get("title", raw["cause"]), raw.get("fix", ""),
                   Where.from_json(raw.get("where") or {}), when.get("first_step"), when.get("last_step"),
                   tuple(Evidence.from_json(e) for e in raw.get("evidence") or ()), raw.get("treatment"),
                   tuple(raw.get("explains") or ()), raw.get("explained_by"), raw.get("confirmed"))


@dataclass(frozen=True, slots=True)
class NotChecked:
    """A rule that could not judge, and why (signal absent, too few steps, compiled region)."""

    rule: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule, "why": self.why}
