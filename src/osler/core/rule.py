"""What a rule is: a pure function from a window to findings, with its description as docstring.

The function's keyword-only arguments are its options; their defaults are the configuration and the documentation.
The docstring has the sections *What it is · How it is seen · Why it matters · What to do · When this is wrong · Source*.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from osler.core.finding import Finding, NotChecked
from osler.core.window import Window

STATUSES = ("preview", "stable", "deprecated")
Check = Callable[..., Iterable[Finding | NotChecked]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the catalogue.

    Attributes:
        cause: id of the ailment; also the rule's name.
        group: folder of the catalogue (wiring, numerics, ...).
        check: the pure function.
        status: preview, stable or deprecated.
    """

    cause: str
    group: str
    check: Check
    status: str = "preview"

    @property
    def text(self) -> str:
        return inspect.getdoc(self.check) or ""

    @property
    def options(self) -> dict[str, Any]:
        """Name to default of every keyword-only argument."""
        parameters = inspect.signature(self.check).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def __call__(self, window: Window, **options: Any) -> list[Finding | NotChecked]:
        return list(self.check(window, **options))


def rule(cause: str, group: str, status: str = "preview") -> Callable[[Check], Rule]:
    """Decorator: turns a check into a ``Rule``. It registers nothing; the catalogue lists rules explicitly."""

    def wrap(check: Check) -> Rule:
        return Rule(cause, group, check, status)

    return wrap
