"""Numbers, steps and spans in words, the same in every view."""

from __future__ import annotations

import math
import re
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"


def count(number: int, noun: str) -> str:
    """``1 step``, ``12 345 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}".replace(",", " ")


def figure(value: float | None) -> str:
    """Three significant figures, powers of ten outside the usual range."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if float(value).is_integer():
        return f"{int(value)}"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"


def share(fraction: float) -> str:
    """A percentage with two figures."""
    percent = 100 * fraction
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    minutes = value / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def span(when: dict[str, Any]) -> str:
    """``steps 1–450``, ``step 7``, ``from step 7``, or nothing."""
    first, last = when.get("first_step"), when.get("last_step")
    if first is None:
        return "" if last is None else f"until step {last}"
    if last is None:
        return f"from step {first}" if first else "from the start"
    return f"step {first}" if first == last else f"steps {first}–{last}"


def guarded(skipped: int) -> str:
    """What ``--guard`` did."""
    return f"skipped {skipped} step{'s' if skipped != 1 else ''} whose loss or gradient was not finite"


def lost(nonfinite: dict[str, Any]) -> str:
    """A curve that ended in NaN, or that met some on the way."""
    first, count = nonfinite["first_step"], nonfinite["count"]
    if nonfinite.get("for_good", True):
        return f"not finite from step {first}"
    return f"not finite at {count} step{'s' if count > 1 else ''}, first {first}"


SHORT_SECONDS = 60.0
"""Below this, the samples that every run gets may weigh more than the budget."""


def cost(overhead: dict[str, Any]) -> str:
    """What osler took, as far as it was measured."""
    fraction, budget, startup = overhead.get("fraction"), overhead.get("budget"), overhead.get("startup_s")
    parts = []
    if fraction is not None:
        limit = f"budget {share(budget)}" if budget is not None else ""
        length = overhead.get("seconds")
        if budget is not None and length is not None and fraction > 1.25 * budget and length < SHORT_SECONDS:
            limit += f"; {seconds(length)} of training is too short to stay inside"
        parts.append(f"{share(fraction)} of the step time" + (f" ({limit})" if limit else ""))
    if startup:
        parts.append(f"{seconds(startup)} at the start")
    return " and ".join(parts)


def ending(end: dict[str, Any] | None) -> str:
    """How the script ended, where that is news."""
    if end is None:
        return "still running"
    if end.get("out_of_memory"):
        return "killed for lack of memory"
    if end.get("signal"):
        return f"ended by {end['signal']}"
    return f"exit code {end['code']}" if end.get("code") else ""


def sentence(text: str) -> str:
    """With a capital and a full stop; code at the beginning stays as it is."""
    text = text.strip()
    text = text[:1].upper() + text[1:] if re.match(r"[a-z]+[ ,:]", text) else text
    return text if not text or text[-1] in ".!?:" else text + "."


def heading(text: str) -> str:
    """A single sentence without its full stop."""
    text = text.strip()
    return text[:-1] if text.endswith(".") and ". " not in text else text


def named(where: dict[str, Any]) -> list[str]:
    """What a finding points at beside its line."""
    rows = [f"parameter {where['parameter']}" if where["parameter"] else f"module {where['module']}" if where["module"] else "",
            f"rank {where['rank']}" if where["rank"] else "", ", ".join(where["columns"][:6])]
    return [row for row in rows if row]


def spark(series: dict[str, Any], width: int) -> str:
    """A series as a row of blocks, in its own scale; a block stands for the largest value under it."""
    values = [v for v in series["max"] if v is not None]
    if series["log"]:
        floor = min((v for v in values if v > 0), default=1.0)
        values = [math.log(max(v, floor)) for v in values]
    size = max(1, math.ceil(len(values) / width))
    groups = [values[i: i + size] for i in range(0, len(values), size)]
    tops = [max(g) for g in groups]
    low, high = min(tops), max(tops)
    return "".join(BLOCKS[round((v - low) / (high - low) * (len(BLOCKS) - 1))] if high > low else BLOCKS[0] for v in tops)


def unchecked(rows: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Reasons in order of first appearance, each with the rules that share it."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["why"], []).append(row["rule"])
    return list(reasons.items())


def confirmation(confirmed: dict[str, Any] | None) -> str:
    """What a trial said about the finding."""
    if not confirmed:
        return ""
    text = confirmed.get("text")
    return str(text) if text else "confirmed by a trial: " + ", ".join(f"{k} {v}" for k, v in confirmed.items())
