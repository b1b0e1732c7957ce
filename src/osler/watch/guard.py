"""The one guard: no exception of ours reaches user code; a tap that fails three times is disarmed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

LIMIT = 3


class Guard:
    """Counts failures per tap and tells the session about them."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._failures: dict[str, int] = {}
        self._provoked = os.environ.get("OSLER_TEST_RAISE", "")

    def armed(self, tap: str) -> bool:
        if self._provoked and tap == self._provoked:
            try:
                raise RuntimeError("provoked by OSLER_TEST_RAISE")
            except RuntimeError:
                self.failed(tap)
                return False
        return self._failures.get(tap, 0) < LIMIT

    def failed(self, tap: str) -> None:
        """Call inside an ``except`` block."""
        count = self._failures[tap] = self._failures.get(tap, 0) + 1
        if count <= LIMIT:
            text = traceback.format_exc(limit=-3)
            self._tell("disarmed" if count == LIMIT else "guard", f"{tap}: {text[-600:]}")

    def wrap(self, tap: str, fn: Callable[..., Any]) -> Callable[..., None]:
        """``fn`` as a callback that returns ``None`` and never raises."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.armed(tap):
                try:
                    fn(*args, **kwargs)
                except Exception:
                    self.failed(tap)

        return guarded
