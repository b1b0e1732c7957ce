"""How findings of the peers are read, generously: the causes that a reader could take them for. What says only that something is
wrong (a loss that is NaN, a plateau) is a symptom and stands for no cause.
"""

from __future__ import annotations

CAUSES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch-audit": {
        "TA102": ("exploding-gradients", "lr-too-high"), "TA103": ("frozen-params", "unused-module", "graph-broken", "vanishing-gradients"),
        "TA104": ("graph-broken", "optimizer-wrong-params", "frozen-params"), "TA105": ("vanishing-gradients", "bad-init", "output-range"),
        "TA301": ("input-scale", "val-preprocessing-mismatch"), "TA302": ("input-scale", "inplace-mutation"), "TA303": ("wrong-dim",), "TA304": ("batchnorm-misuse",),
        "TA305": ("nonfinite-input",), "TA402": ("optimizer-hyperparams",), "TA403": ("optimizer-hyperparams",),
        "TA500": ("unused-module", "unregistered-params"), "TA501": ("batchnorm-misuse",),
    },
    "torchmortem": {
        "Vanishing gradients detected": ("vanishing-gradients", "graph-broken", "unused-module"), "Exploding gradients detected": ("exploding-gradients", "lr-too-high", "grad-not-cleared"),
        "Gradient stalling": ("vanishing-gradients", "graph-broken", "frozen-params", "unused-module"), "Dead units": ("bad-init", "lr-too-high"),
        "Activation saturation": ("output-range", "input-scale", "bad-init"), "Update ratio too low": ("lr-too-low", "low-precision-updates-lost", "grad-clip-misuse", "lr-schedule"),
        "Update ratio too high": ("lr-too-high", "loss-scale"), "Weight norm explosion": ("exploding-gradients", "lr-too-high"),
        "Stagnant weight norms": ("lr-too-low", "optimizer-wrong-params", "frozen-params"), "Training divergence detected": ("lr-too-high", "loss-sign"),
        "Rank collapse": ("embedding-collapse", "bad-init"), "Edge of stability regime detected": ("lr-too-high",),
        "Instability feedback loop -- gradients and weights exploding": ("exploding-gradients", "lr-too-high"),
    },
    "training-doctor": {
        "Learning rate likely too high": ("lr-too-high", "loss-scale"), "Learning rate may be too low": ("lr-too-low", "grad-clip-misuse", "lr-schedule"),
        "Gradient instability detected": ("exploding-gradients", "grad-not-cleared"), "Possible mixed precision instability": ("fp16-overflow", "amp-scaler-not-updated"),
        "Unusual train/eval pattern": ("eval-mode-missing", "train-val-overlap", "dropout-misuse"),
    },
    "trainproof": {
        "TP-DIVERGE": ("lr-too-high", "loss-sign"), "TP-GRAD-SPIKE": ("exploding-gradients", "corrupt-sample-spike", "lr-too-high"), "TP-NAN-GRAD": ("singular-gradient", "fp16-overflow"),
        "TP-ZERO-GRAD": ("graph-broken", "grad-cleared-before-step", "frozen-params"), "TP-ZERO-LR": ("lr-schedule",), "TP-ZERO-LR-PARTIAL": ("lr-schedule",),
        "TP-FLAT": ("lr-too-low", "frozen-params", "optimizer-wrong-params"), "TP-DEAD-RUN": ("lr-too-low", "frozen-params", "optimizer-wrong-params"),
        "TP-LOADER-BOUND": ("slow-dataset", "no-workers"),
    },
}
HINTS: dict[str, frozenset[str]] = {
    "torch-audit": frozenset(("TA200", "TA201", "TA202", "TA203", "TA400", "TA401", "TA402", "TA403", "TA404")),
    "torchmortem": frozenset(), "training-doctor": frozenset(), "trainproof": frozenset(("TP-PASS", "TP-NOT-CHECKED")),
}
"""Hints on style and speed, which are no alarms."""
LOUD = frozenset(("WARN", "WARNING", "ERROR", "CRITICAL", "FAIL", "FATAL"))


def causes(peer: str, finding: dict[str, str]) -> tuple[str, ...]:
    return CAUSES[peer].get(finding["id"], ())


def alarm(peer: str, finding: dict[str, str]) -> bool:
    return finding["level"].upper() in LOUD and finding["id"] not in HINTS[peer]
