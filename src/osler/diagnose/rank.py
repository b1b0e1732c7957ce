"""The order of findings: the first line a user reads is the thing to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from osler.core.finding import CERTAINTIES, LOUD, SEVERITIES, Finding
from osler.diagnose.meanings import GROUP, SYMPTOMS

GROUPS = ("wiring", "numerics", "precision", "data", "evaluation", "distributed", "tables", "optimization", "signal", "system",
          "symptoms")
"""Facts of the program before statistics of its numbers."""

LAST = 1 << 62


def strength(finding: Finding) -> tuple[Any, ...]:
    """Sort key, strongest first: loud before quiet, causes before symptoms, then severity, certainty, group and time.

    A symptom, however fatal, says nothing that can be changed; it stands behind every loud cause.
    """
    where = finding.where
    return (finding.severity not in LOUD, finding.cause in SYMPTOMS, SEVERITIES.index(finding.severity),
            CERTAINTIES.index(finding.certainty), group_rank(finding.cause),
            finding.first_step if finding.first_step is not None else LAST,
            finding.cause, where.file or "", where.line or 0, where.module or "", where.rank or 0)


def group_rank(cause: str) -> int:
    group = GROUP.get(cause, "signal")
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)


def rank(findings: Iterable[Finding]) -> list[Finding]:
    """Unexplained findings first, then the folded ones."""
    return sorted(findings, key=lambda f: (f.explained_by is not None, strength(f)))
