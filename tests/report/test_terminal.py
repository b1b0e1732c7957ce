"""Terminal screens as snapshots; ``UPDATE=1 pytest`` rewrites them for review in the diff."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest
import report_sample as sample

from osler.core.finding import Finding, Where
from osler.report.model import build
from osler.report.terminal import one_line, render

SCREENS = Path(__file__).parent / "screens"
LINK = "osler-runs/2026-10-05T14-02-11-train/report.html"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def screen(which: str, width: int, color: str) -> str:
    stream = io.StringIO()
    render(build(*getattr(sample, which)()), stream, color, width, LINK)
    return stream.getvalue()


@pytest.mark.parametrize("color", ["never", "always"])
@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("which", ["faulty", "healthy", "broken"])
def test_screens(which: str, width: int, color: str) -> None:
    text = screen(which, width, color)
    file = SCREENS / f"{which}-{width}{'-color' if color == 'always' else ''}.txt"
    if os.environ.get("UPDATE"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_or_ends_in_spaces(width: int) -> None:
    for line in ESCAPE.sub("", screen("faulty", width, "always")).splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


def test_the_first_line_after_the_head_is_the_thing_to_change() -> None:
    lines = [line for line in screen("faulty", 80, "never").splitlines() if line]
    assert lines[1] == "train.py:18  Call `optimizer.zero_grad()` before `loss.backward()`"


def test_no_color_has_no_escapes_and_color_says_the_same_words() -> None:
    plain, colored = screen("faulty", 80, "never"), screen("faulty", 80, "always")
    assert "\x1b" not in plain and "\x1b[" in colored
    assert ESCAPE.sub("", colored) == plain.replace("`", "")


def test_a_healthy_run_is_short() -> None:
    assert len(screen("healthy", 80, "never").splitlines()) <= 12


def test_a_stream_without_utf_8_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    for which in ("faulty", "broken", "healthy"):
        render(build(*getattr(sample, which)()), stream, "never", 80)
    stream.flush()
    assert b"> 18 |" in raw.getvalue()


def test_one_line() -> None:
    found = Finding("grad-not-cleared", "certain", "harmful", "449 of 450 steps\nadd up", "Call optimizer.zero_grad()", Where("/w/train.py", 18))
    assert one_line(found, "/w") == "osler: train.py:18: 449 of 450 steps add up. Call optimizer.zero_grad(). [grad-not-cleared]"
    assert one_line(Finding("loss-nan", "certain", "fatal", "the loss is NaN", "")) == "osler: The loss is NaN. [loss-nan]"
