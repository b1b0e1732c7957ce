"""Which cause brings about which: the graph along which symptoms are folded under the thing to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from osler.core.finding import CERTAINTIES, LOUD, Finding
from osler.diagnose.meanings import SYMPTOMS
from osler.diagnose.rank import strength

STANDSTILL = ("lr-too-low", "loss-plateau", "params-not-moving")
BLOW_UP = ("exploding-gradients", "loss-diverged", "loss-spikes", "loss-nan", "nonfinite-gradient", "fp16-overflow")
NONFINITE = ("loss-nan", "nonfinite-gradient")
WEAK_GRADIENT = ("vanishing-gradients", *STANDSTILL)
STATISTICAL = frozenset((*WEAK_GRADIENT, *BLOW_UP, "lr-too-high", "dead-units", "embedding-collapse", *SYMPTOMS))
"""Effects that are read off numbers, however surely; anything else that is certain is a fact of its own."""


@dataclass(frozen=True, slots=True)
class Edge:
    cause: str
    explains: str
    reason: str
    firm: bool


def _edges(firm: bool, *rows: tuple[str, tuple[str, ...], str]) -> tuple[Edge, ...]:
    return tuple(Edge(cause, effect, reason, firm) for cause, effects, reason in rows for effect in effects if effect != cause)


FACTS: tuple[Edge, ...] = _edges(
    True,
    ("unregistered-params", ("optimizer-wrong-params", "frozen-params", "weights-not-loaded", "unused-module"),
     "what the model does not register, parameters() does not list and the optimizer does not get"),
    ("frozen-params", ("optimizer-wrong-params",), "frozen parameters are left out of the optimizer"),
    ("optimizer-wrong-params", ("frozen-params", "grad-not-cleared", "unused-module", "lr-schedule", "shadow-weights-stale"),
     "what no optimizer holds is neither moved nor cleared"),
    ("graph-broken", ("unused-module", "optimizer-wrong-params", "step-missing-or-rare"), "parameters behind the cut get no gradient"),
    ("ddp-unused-parameters", ("unused-module", "graph-broken", "optimizer-wrong-params", "ddp-params-unsynced"), "the reducer says which parameters the loss leaves out"),
    ("grad-cleared-before-step", ("step-missing-or-rare", "optimizer-wrong-params", "graph-broken"),
     "the step finds gradients that are zero or absent"),
    ("step-missing-or-rare", ("grad-not-cleared", "lr-schedule"), "between two steps gradients pile up"),
    ("drop-last-data-loss", ("step-missing-or-rare",), "batches that are dropped make no steps"),
    ("double-activation", ("loss-expects-log-probs", "output-range"), "the loss gets scores that were squeezed before"),
    ("loss-head-mismatch", ("shape-broadcast",), "outputs of the wrong shape meet the targets"),
    ("wrong-dim", ("loss-head-mismatch",), "outputs that are laid out wrongly do not fit the loss"),
    ("nonfinite-input", ("log-of-zero", "division-by-zero", "singular-gradient", "infeasible-target", "fp16-overflow"), "NaN in, NaN out"),
    ("log-of-zero", ("singular-gradient",), "the derivative of log at 0 is infinite too"),
    ("division-by-zero", ("singular-gradient",), "the derivative of a quotient with denominator 0 is infinite too"),
    ("hidden-state-not-detached", ("loss-graph-retained", "python-memory-leak"), "the state carried over keeps the graph of every batch before it"),
    ("loss-graph-retained", ("hidden-state-not-detached", "python-memory-leak"), "whoever keeps a tensor keeps its graph"),
    ("no-grad-missing", ("loss-graph-retained", "python-memory-leak"), "what an evaluation adds up carries the graphs that it builds"),
    ("no-workers", ("slow-dataset",), "waiting is the whole cost of an item"),
    ("amp-scaler-not-updated", ("fp16-overflow", "fp16-underflow", "step-missing-or-rare"), "the loss scale never settles"),
    ("amp-unscale-missing", ("loss-scale", "lr-too-high", "grad-clip-misuse"), "the loss scale is still on the gradients"),
    ("fp16-overflow", ("fp16-underflow", "step-missing-or-rare"), "infinities make every later value zero or not a number, and scalers skip such steps"),
    ("worker-seed-duplicate", ("nondeterminism",), "the numbers repeat where they should differ"),
    ("ddp-no-sampler", ("ddp-set-epoch-missing", "worker-seed-duplicate"), "without a sampler there is nothing to tell the epoch"),
    ("ddp-set-epoch-missing", ("worker-seed-duplicate",), "the order of an epoch is seeded by a number that never changes"),
    ("group-leak", ("train-val-overlap",), "rows of one entity are alike"),
    ("temporal-leak", ("train-val-overlap", "group-leak"), "overlapping windows share rows"),
    ("preprocessing-leak", ("train-val-overlap", "group-leak"), "rows copied before the split are on both sides"),
    ("train-val-overlap", ("group-leak",), "the same row on both sides is its own twin"),
    *((cause, ("out-of-memory", "process-killed", "script-failed"), "memory grows until there is none left")
      for cause in ("hidden-state-not-detached", "loss-graph-retained", "no-grad-missing", "python-memory-leak")),
    ("out-of-memory", ("process-killed", "script-failed"), "the system ends a process that asks for more than there is"),
    *((cause, ("script-failed",), "this is what the exception is about") for cause in (
        "graph-broken", "inplace-mutation", "loss-head-mismatch", "shape-broadcast", "wrong-dim", "checkpoint-rng-mismatch",
        "optimizer-wrong-params", "amp-scaler-not-updated", "frozen-params", "drop-last-data-loss", "ddp-unused-parameters")),
)
"""One fact of the program that is another, seen from the other side: holds even if both are certain."""

STATISTICS: tuple[Edge, ...] = _edges(
    False,
    # parameters that cannot learn
    ("graph-broken", WEAK_GRADIENT, "parameters behind the cut get no gradient, whatever their learning rate"),
    ("frozen-params", ("unused-module", *WEAK_GRADIENT), "frozen parameters do not move"),
    ("unregistered-params", WEAK_GRADIENT, "parameters the optimizer does not know do not move"),
    ("optimizer-wrong-params", ("exploding-gradients", *WEAK_GRADIENT), "parameters that no optimizer holds never move"),
    ("unused-module", WEAK_GRADIENT, "parameters without influence on the loss get no gradient"),
    ("step-missing-or-rare", ("exploding-gradients", *WEAK_GRADIENT), "without steps nothing moves and gradients pile up"),
    ("drop-last-data-loss", ("loss-spikes", *STANDSTILL), "batches that are dropped make no steps"),
    ("grad-cleared-before-step", WEAK_GRADIENT, "the step finds gradients that are zero or absent"),
    ("grad-not-cleared", ("lr-too-high", "loss-scale", "loss-plateau", "dead-units", *BLOW_UP),
     "gradients that add up act like a learning rate that grows with every step"),
    ("train-mode-not-restored", ("overfit", "batchnorm-misuse", "dropout-misuse", "loss-plateau"),
     "dropout is off and batch statistics are frozen while the model trains"),
    # losses and outputs
    ("double-activation", WEAK_GRADIENT, "the doubled activation squeezes the scores, and their gradients with them"),
    ("loss-expects-log-probs", ("loss-sign", "output-range", *STANDSTILL, *BLOW_UP),
     "scores read as log-probabilities give a loss without a minimum at the right answer"),
    ("loss-head-mismatch", ("output-range", "target-scale", *WEAK_GRADIENT), "outputs that do not fit the loss cannot approach the targets"),
    ("shape-broadcast", ("loss-scale", "overfit", "target-scale", *STANDSTILL),
     "every prediction is compared with every target, so the best answer is the mean"),
    ("wrong-dim", ("batchnorm-misuse", "eval-mode-missing", "overfit", "embedding-collapse", *WEAK_GRADIENT),
     "mixed axes hide from the model what it should learn"),
    ("output-range", ("dead-units", "target-scale", "loss-nan", *WEAK_GRADIENT), "outputs cannot reach the targets, so the activation saturates"),
    ("loss-sign", ("overfit", "log-of-zero", "loss-plateau", "lr-too-high", "loss-scale", "dead-units", "embedding-collapse", *BLOW_UP), "the loss is driven the wrong way without end"),
    ("loss-scale", ("lr-too-high", "lr-too-low", "vanishing-gradients", *BLOW_UP),
     "a loss that is off by a factor acts like a learning rate that is off by the same factor"),
    ("loss-scale", ("dead-units", "loss-plateau", "embedding-collapse"), "steps off by the same factor lose the units, or never reach anything"),
    *((cause, ("class-imbalance-metric",), "a model that does not learn answers with the common class") for cause in (
        "lr-too-low", "lr-too-high", "lr-schedule", "dead-units", "vanishing-gradients", "frozen-params", "graph-broken", "bad-init", "double-activation", "step-missing-or-rare", "loss-scale",
        "loss-sign", "label-noise", "label-misaligned", "input-scale", "grad-clip-misuse", "optimizer-hyperparams", "wrong-dim", "shape-broadcast", "dropout-misuse", "optimizer-wrong-params",
        "unregistered-params", "grad-cleared-before-step", "loss-expects-log-probs", "loss-head-mismatch", "inplace-mutation", "batchnorm-misuse", "weights-not-loaded")),
    ("class-weighting", ("class-imbalance-metric", "loss-plateau", "overfit"), "the weights steer the model to the wrong class"),
    ("label-mask", ("overfit", "class-imbalance-metric", "infeasible-target", "division-by-zero", *STANDSTILL),
     "the loss counts positions that say nothing, or leaves out those that do"),
    ("attention-mask", ("log-of-zero", "division-by-zero", "singular-gradient", "overfit", "target-leak-feature", "loss-plateau", "vanishing-gradients", *NONFINITE),
     "attention with nothing to look at divides by zero; attention that sees too much learns nothing"),
    ("inplace-mutation", ("input-scale", "val-preprocessing-mismatch", "label-misaligned", "overfit", "loss-plateau", *BLOW_UP),
     "the values change a little more at every pass"),
    ("dropout-misuse", ("eval-mode-missing", "overfit", "val-augmented", *STANDSTILL), "the noise of dropout covers the signal"),
    ("batchnorm-misuse", ("overfit", "eval-mode-missing", "loss-plateau", "loss-spikes", "val-preprocessing-mismatch"),
     "wrong running statistics make evaluation differ from training"),
    ("weights-not-loaded", ("loss-plateau", "overfit", "lr-too-low"), "the model starts from random weights"),
    ("tied-weights-broken", ("overfit", "loss-plateau"), "two copies learn apart"),
    ("shadow-weights-stale", ("overfit", "loss-plateau", "loss-diverged"), "the copy that is read never learns"),
    # optimization and signal
    ("lr-too-high", ("dead-units", "loss-plateau", "output-range", "logit-growth", *BLOW_UP),
     "steps that are too large leave the region where the gradient means anything"),
    ("lr-schedule", ("lr-too-low", "lr-too-high", "early-stop-misconfigured", "loss-plateau", "params-not-moving", *BLOW_UP),
     "the schedule sets the learning rate"),
    ("optimizer-hyperparams", ("lr-too-high", "dead-units", "bad-init", "output-range", "embedding-collapse", *WEAK_GRADIENT, *BLOW_UP),
     "momentum, decay and eps scale every step"),
    ("grad-clip-misuse", STANDSTILL, "clipping shortens every step"),
    ("grad-clip-misuse", ("lr-too-high", *BLOW_UP), "clipping at the wrong place holds nothing back"),
    ("bad-init", ("dead-units", "output-range", "lr-too-high", "high-initial-loss", *WEAK_GRADIENT, *BLOW_UP), "the signal is lost, or far too large, from the first step"),
    ("input-scale", ("lr-too-high", "dead-units", "bad-init", "high-initial-loss", "logit-growth", *WEAK_GRADIENT, *BLOW_UP),
     "inputs far from unit scale saturate the first layers or make their gradients huge"),
    ("target-scale", ("lr-too-high", "loss-scale", "grad-clip-misuse", "output-range", *STANDSTILL, *BLOW_UP),
     "targets far from unit scale make loss and gradients far from it too"),
    ("dead-units", WEAK_GRADIENT, "units that are always zero pass no gradient on"),
    ("exploding-gradients", ("loss-diverged", "loss-spikes", "lr-too-high", *NONFINITE), "gradients grow until the step overshoots"),
    ("vanishing-gradients", ("half-frozen", *STANDSTILL), "layers that get no gradient do not move"),
    ("embedding-collapse", ("dead-units", "lr-too-high", "vanishing-gradients", "half-frozen", *STANDSTILL), "one point for everything is where the loss gets stuck"),
    ("lr-too-low", ("loss-plateau", "params-not-moving"), "steps this small change nothing"),
    # numbers
    *((cause, ("lr-too-high", "dead-units", *(e for e in BLOW_UP if e != "fp16-overflow")), "what is not finite spoils everything after it") for cause in (
        "nonfinite-input", "log-of-zero", "division-by-zero", "singular-gradient", "infeasible-target")),
    ("corrupt-sample-spike", ("input-scale", "lr-too-high", *BLOW_UP), "the spike comes from the sample"),
    ("amp-unscale-missing", ("grad-clip-misuse", *STANDSTILL, *BLOW_UP), "scaled gradients are thousands of times too large for the threshold"),
    ("amp-scaler-not-updated", (*STANDSTILL, *NONFINITE), "steps are skipped or gradients lost"),
    ("low-precision-updates-lost", STANDSTILL, "updates below the spacing of the weights are rounded away"),
    ("fp16-underflow", WEAK_GRADIENT, "gradients below the smallest float16 are zero"),
    ("fp16-overflow", BLOW_UP, "values above 65504 are infinite in float16"),
    ("hidden-state-not-detached", ("exploding-gradients",), "gradients flow through every batch before"),
    # data and evaluation
    ("no-shuffle-sorted", ("loss-spikes", "loss-sawtooth", "batchnorm-misuse", "overfit", "loss-plateau", "class-imbalance-metric", "dead-units"),
     "the model forgets one class while it sees the next"),
    ("label-misaligned", ("label-noise", "overfit", "loss-crawl", "loss-stairs", "loss-sawtooth", *STANDSTILL), "labels that belong to other inputs are noise"),
    ("label-noise", ("overfit", "loss-crawl", *STANDSTILL), "wrong labels can only be learned by heart"),
    # a loss that jumps: data first, then hardware, framework and algorithm (handbook B, section 11)
    ("corrupt-sample-spike", ("loss-jitter", "loss-sawtooth", "target-scale", "bad-init", "dead-units", "output-range", "grad-clip-misuse", "val-preprocessing-mismatch",
                              "loss-plateau", "gradient-collapse", "splits-apart", "optimizer-hyperparams"), "the batch with the absurd row comes once in every epoch"),
    ("nondeterminism", ("loss-jitter",), "hardware or unseeded numbers make steps differ for no reason in the data"),
    ("fp16-overflow", ("loss-jitter",), "skipped and wrong steps of a half-precision framework"),
    *((cause, ("loss-jitter",), "the algorithm: steps that are too large overshoot and come back") for cause in ("lr-too-high", "optimizer-hyperparams", "grad-clip-misuse")),
    *((cause, ("loss-cliff",), "the first steps only undo a bad start") for cause in ("bad-init", "input-scale", "target-scale", "lr-too-high", "output-range")),
    *((cause, ("loss-crawl",), "gradients or steps are too small to get anywhere") for cause in (
        "lr-too-low", "lr-schedule", "vanishing-gradients", "dead-units", "optimizer-hyperparams", "graph-broken", "frozen-params", "grad-clip-misuse",
        "optimizer-wrong-params", "unregistered-params", "double-activation", "input-scale", "target-scale", "shape-broadcast", "wrong-dim")),
    ("lr-schedule", ("loss-sawtooth", "loss-stairs", "loss-jitter"), "the curve follows the swings and steps of the rate"),
    *((cause, ("gradient-collapse",), "a layer that no longer matters, or units that died, get no gradient") for cause in (
        "dead-units", "vanishing-gradients", "lr-too-high", "embedding-collapse", "optimizer-hyperparams", "lr-schedule", "fp16-underflow", "exploding-gradients")),
    *((cause, ("splits-apart",), "the two sides were prepared or chosen differently") for cause in (
        "val-preprocessing-mismatch", "val-augmented", "inplace-mutation", "temporal-leak", "no-shuffle-sorted")),
    *((cause, ("loss-stairs", "overfit"), "validation rows are learned, or their score means something else") for cause in (
        "train-val-overlap", "target-leak-feature", "preprocessing-leak", "group-leak", "temporal-leak")),
    ("eval-mode-missing", ("overfit", "val-augmented", "nondeterminism"), "validation runs with dropout and batch statistics on"),
    ("val-preprocessing-mismatch", ("overfit",), "validation sees inputs the model was not trained on"),
    ("ddp-params-unsynced", ("nondeterminism", "overfit"), "every rank trains a model of its own"),
)
"""A cause and the statistics it moves: does not hold against a certain fact, only against what was measured."""

EDGES = FACTS + STATISTICS
_EDGE: dict[tuple[str, str], Edge] = {}
for _edge in EDGES:
    _EDGE.setdefault((_edge.cause, _edge.explains), _edge)


def reason(cause: str, effect: str) -> str | None:
    """Why ``cause`` brings about ``effect``, along the shortest chain of the graph."""
    seen, queue = {cause}, [(cause, "")]
    while queue:
        here, first = queue.pop(0)
        for edge in EDGES:
            if edge.cause != here or edge.explains in seen:
                continue
            why = first or edge.reason
            if edge.explains == effect:
                return why
            seen.add(edge.explains)
            queue.append((edge.explains, why))
    return None


def may_explain(cause: Finding, effect: Finding) -> bool:
    """Whether the graph, or the rule itself, says so, and nothing in the two findings speaks against it.

    A weaker claim never hides a stronger one, a note never hides a loud finding, a statistical link never hides a
    certain fact, and a statistic that began after the end of the other cannot have caused it. A symptom is folded under any claim
    that says why.
    """
    edge = _EDGE.get((cause.cause, effect.cause))
    said = effect.cause in cause.explains
    if cause.cause == effect.cause or (edge is None and not said):
        return False
    if effect.severity in LOUD and cause.severity not in LOUD:
        return False
    if effect.cause not in SYMPTOMS and CERTAINTIES.index(cause.certainty) > CERTAINTIES.index(effect.certainty):
        return False
    if effect.certainty == "certain" and effect.cause not in STATISTICAL and not said and not (edge and edge.firm):
        return False
    if cause.certainty == "certain":  # a fact of the program may be written long after it began
        return True
    return cause.first_step is None or effect.last_step is None or cause.first_step <= effect.last_step


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings with ``explained_by`` (the cause at the root of the chain) and ``explains`` filled in.

    The weakest finding is folded first and under the strongest explainer that does not already lean on it, so a
    circle opens at its strongest member, always in the same way.
    """
    order = sorted(range(len(findings)), key=lambda i: strength(findings[i]))
    parent: dict[int, int] = {}
    for effect in reversed(order):
        for cause in order:
            if cause != effect and root(cause, parent) != effect and may_explain(findings[cause], findings[effect]):
                parent[effect] = cause
                break
    below: dict[int, list[str]] = {}
    for effect in order:
        if effect in parent:
            below.setdefault(root(effect, parent), []).append(findings[effect].cause)
    return [f.replace(explained_by=findings[root(i, parent)].cause if i in parent else None,
                      explains=tuple(dict.fromkeys(below.get(i, ()))))
            for i, f in enumerate(findings)]


def root(index: int, parent: dict[int, int]) -> int:
    while index in parent:
        index = parent[index]
    return index

