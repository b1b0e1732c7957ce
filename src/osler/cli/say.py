"""What osler says while somebody else owns the terminal: whole lines on stderr, each in one write, never an exception."""

from __future__ import annotations

import os
import sys

STDERR = 2
LONGEST = 2000


def say(text: str) -> None:
    """One line. On a terminal it starts a line of its own even where a progress bar stands in the middle of one."""
    line = " ".join(text.split())[:LONGEST]
    put(fresh_line() + line + "\n")


def put(text: str) -> None:
    put_bytes(text.encode("utf-8", "replace"))


def put_bytes(data: bytes) -> None:
    """Write all of it, or as much as a closed or full stderr takes."""
    try:
        while data:
            data = data[os.write(STDERR, data):]
    except OSError:
        pass


def fresh_line() -> str:
    """Blanks up to the right edge, then back: nothing to see on an empty line, a line break on one that has text."""
    width = terminal_width()
    return " " * (width - 1) + "\r" if width else ""


def terminal_width() -> int:
    """Columns of the terminal on stderr, 0 where it is none."""
    try:
        return os.get_terminal_size(STDERR).columns if os.isatty(STDERR) else 0
    except OSError:
        return 0


def colored(choice: str) -> bool:
    """Whether stderr gets colours under ``--color auto|always|never``."""
    if choice != "auto":
        return choice == "always"
    return bool(terminal_width()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def stdout_colored(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
