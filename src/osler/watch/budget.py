"""The overhead contract: a token bucket over measured time."""

from __future__ import annotations

STARTUP_SECONDS = 0.25
"""Time that first steps may cost beyond the budget: structural facts are gathered there, once."""


class Budget:
    """Earns ``share`` of the training time and spends what osler measures of itself.

    Attributes:
        share: fraction of step time that may be spent.
        spent: own seconds so far (start-up included).
        startup_left: what remains of the one-time start-up allowance.
    """

    def __init__(self, share: float = 0.02, startup: float = STARTUP_SECONDS) -> None:
        self.share = share
        self.spent = 0.0
        self.startup_left = startup
        self._earned = 0.0
        self._charged = 0.0

    def step(self, step_time: float, own_time: float) -> None:
        """Book one step."""
        self.spent += own_time
        self._earned += self.share * 0.8 * max(step_time - own_time, 0.0)
        covered = min(own_time, self.startup_left) if self.startup_left > 0 else 0.0
        self.startup_left -= covered
        self._charged += own_time - covered

    def allows(self, cost: float) -> bool:
        """Whether ``cost`` seconds can be spent now."""
        return cost <= self.startup_left or self._charged + cost <= self._earned

    @property
    def tight(self) -> bool:
        """The per-step floor alone is over the budget: thin it out."""
        return self.startup_left <= 0 and self._charged > self._earned
