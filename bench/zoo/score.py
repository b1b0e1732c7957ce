"""How a run of one case is judged, and how verdicts add up. No processes here.

A **hit** is one of the first three findings naming the true cause (or one in the case's ``accept``); findings that another one
explains do not count. **Line**: a hit names the script and a line within three of ``fault_lines`` or ``accept_lines``. On a
repaired or clean script every finding of severity fatal or harmful is a **false alarm**. A run without readable findings is
**broken**.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

LOUD = frozenset({"fatal", "harmful"})
SLACK = 3
LOOKED_AT = 3


@dataclass(frozen=True)
class Verdict:
    """What came of one run. ``wanted`` begins with the true cause; ``line`` is ``None`` where the case names no lines."""

    case: str
    script: str
    group: str
    faulty: bool
    said: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    first: bool = False
    named: bool = False
    line: bool | None = None
    lines_said: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    broken: str | None = None
    exit: int | str | None = None
    seconds: float = 0.0
    identical: bool | None = None
    overhead: float | None = None
    stderr: str = field(default="", repr=False)

    @property
    def mark(self) -> str:
        if self.broken:
            return "BROKEN"
        if self.faulty:
            return "first" if self.first else "named" if self.named else "MISSED"
        return "ALARM" if self.alarms else "silent"


def judge(truth: dict[str, Any], findings: list[dict[str, Any]], faulty: bool) -> dict[str, Any]:
    """The fields of a ``Verdict`` that follow from the findings.

    Args:
        truth: the case's ``truth.json``.
        findings: the findings in the order osler ranked them.
        faulty: whether the faulty script was run (else the repaired or clean one).
    """
    own = [f for f in findings if not f.get("explained_by")]
    said = tuple(f["cause"] for f in own)
    if not faulty:
        loud = tuple(f["cause"] for f in own if f.get("severity") in LOUD)
        return {"said": said, "alarms": loud, "quiet": tuple(f["cause"] for f in own if f.get("severity") not in LOUD)}
    wanted = tuple(dict.fromkeys(c.replace("_", "-") for c in (truth["root_cause"], *truth.get("accept", []))))
    hits = [f for f in own[:LOOKED_AT] if f["cause"] in wanted]
    ranges = [*(truth.get("fault_lines") or []), *(truth.get("accept_lines") or [])]
    return {"said": said, "wanted": wanted, "first": bool(own) and own[0]["cause"] in wanted, "named": bool(hits),
            "line": any(near(f, ranges) for f in hits) if ranges else None,
            "lines_said": tuple(f"{w.get('file')}:{w.get('line')}" for w in (f.get("where") or {} for f in hits))}


def near(finding: dict[str, Any], ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether the finding names the script and a line close to one of the ranges."""
    where = finding.get("where") or {}
    line = where.get("line")
    return (str(where.get("file") or "").endswith("train.py") and line is not None
            and any(low - SLACK <= line <= high + SLACK for low, high in ranges))


def totals(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts over the faulty runs, the healthy runs and all of them."""
    bad = [v for v in verdicts if v.faulty]
    good = [v for v in verdicts if not v.faulty]
    return {"faults": len(bad), "first": sum(v.first for v in bad), "named": sum(v.named for v in bad),
            "line": sum(bool(v.line) for v in bad), "line_of": sum(v.line is not None for v in bad),
            "healthy": len(good), "false_alarm_runs": sum(bool(v.alarms) for v in good),
            "quiet_runs": sum(bool(v.quiet) for v in good), "broken": sum(v.broken is not None for v in verdicts)}


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Totals, the same by group, and ``structural``: the groups whose faults are facts of the program."""
    groups = sorted({v.group for v in verdicts})
    structural = [v for v in verdicts if v.group in {"wiring", "evaluation", "numerics"}]
    return {**totals(verdicts), "structural": totals(structural),
            "groups": {g: totals([v for v in verdicts if v.group == g]) for g in groups}}
