"""Findings on the wire, schema 1: one document, or one line per item for programs that follow a run."""

from __future__ import annotations

import json
from typing import Any

FINDING_KEYS = ("cause", "certainty", "severity", "title", "where", "when", "evidence", "explains", "explained_by", "fix", "treatment",
                "confirmed")


def wire(model: dict[str, Any]) -> dict[str, Any]:
    """The part of the view model that is promised to other programs."""
    return {"schema": model["schema"], "run": model["run"], "overhead": model["overhead"],
            "findings": [{key: row[key] for key in FINDING_KEYS} for row in model["findings"]],
            "not_checked": model["not_checked"], "checked": model["checked"], "suppressed": model["counts"]["suppressed"]}


def render(model: dict[str, Any]) -> str:
    return json.dumps(wire(model), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def render_lines(model: dict[str, Any]) -> str:
    """JSON lines: first ``run``, then every ``finding`` in the order of ranking, then every ``not_checked``."""
    document = wire(model)
    head = {"type": "run", "schema": document["schema"], "run": document["run"], "overhead": document["overhead"],
            "checked": document["checked"], "suppressed": document["suppressed"]}
    rows = [head, *({"type": "finding", **f} for f in document["findings"]),
            *({"type": "not_checked", **n} for n in document["not_checked"])]
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
