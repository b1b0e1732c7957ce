"""The overhead contract: a token bucket over measured time."""

from __future__ import annotations

STARTUP_STEPS = 8
"""Steps whose cost counts as start-up: the structure of the program is recorded there, once."""
CREDIT_SECONDS = 0.008
"""What may be spent ahead of the budget, so that the first dozen steps of a short run are measured too."""


class Budget:
    """Earns ``share`` of the training time and spends what osler measures of itself.

    Attributes:
        share: fraction of training time that may be spent.
        spent: own seconds so far, start-up included.
        startup: own seconds of the first steps, which the budget does not cover.
    """

    def __init__(self, share: float = 0.02, credit: float = CREDIT_SECONDS) -> None:
        self.share = share
        self.spent = 0.0
        self.startup = 0.0
        self._steps = 0
        self._earned = credit
        self._charged = 0.0

    def step(self, elapsed: float, own: float) -> None:
        """Book the time since the last booking."""
        self.spent += own
        self._steps += 1
        if self._steps <= STARTUP_STEPS:
            self.startup += own
            return
        self._earned += self.share * 0.8 * max(elapsed - own, 0.0)
        self._charged += own

    @property
    def starting(self) -> bool:
        return self._steps < STARTUP_STEPS

    def allows(self, cost: float) -> bool:
        """Whether ``cost`` seconds can be spent now."""
        return self._steps < STARTUP_STEPS or self._charged + cost <= self._earned

    @property
    def tight(self) -> bool:
        """The per-step floor alone is over the budget: thin it out."""
        return self._steps >= STARTUP_STEPS and self._charged > self._earned
