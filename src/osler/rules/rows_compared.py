"""What the ``table`` experiments found when they compared training rows with validation rows."""

from __future__ import annotations

from typing import Any

from osler.core.facts import Fact
from osler.core.window import Window

UNSEEN = "the rows that training and validation use could not be compared"


def tables(window: Window) -> list[Fact]:
    """Facts of the comparison that could judge."""
    return [f for f in window.facts("experiment") if f.get("name") == "table" and not f.get("unclear") and not f.get("failed")]


def part(fact: Fact, name: str) -> dict[str, Any]:
    """One answer of a comparison, empty where the question made no sense."""
    found = fact.get(name)
    return found if isinstance(found, dict) else {}


def number(row: dict[str, Any], key: str, default: float = 0.0) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else default
