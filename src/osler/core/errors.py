"""The exception tree.

* ``OslerError`` – anything the command line prints as one line, with an exit code
    * ``UsageError`` – the call itself is wrong (64)
    * ``RunNotFound`` – no run folder where one was named (66)
    * ``RunUnreadable`` – a run folder that is damaged or of a newer schema (65)
    * ``MissingExtra`` – an optional dependency is not installed (69)
"""

from __future__ import annotations


class OslerError(Exception):
    """One clear line: what was expected, what came, what to do."""

    exit_code = 70


class UsageError(OslerError):
    exit_code = 64


class RunNotFound(OslerError):
    exit_code = 66


class RunUnreadable(OslerError):
    exit_code = 65


class MissingExtra(OslerError):
    exit_code = 69

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}, which is not installed. Try: pip install 'osler[{extra}]'")
