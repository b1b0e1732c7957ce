from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import VIEWS, Op
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.curve import Curve, curve, motion, optimizer
from osler.rules.graph_questions import Pass, modules, parameters, passes

COMPARES = frozenset(("cosine_similarity", "pairwise_distance", "cdist", "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss",
                      "hinge_embedding_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "sub", "matmul", "mm", "mul", "einsum", "dist"))
NAMED = frozenset(("cosine_similarity", "pairwise_distance", "cdist", "triplet_margin_loss", "triplet_margin_with_distance_loss", "cosine_embedding_loss", "hinge_embedding_loss"))
ATTRACTS = VIEWS | {"sub", "pow", "square", "mul", "sum", "mean", "add", "add_", "neg", "div", "norm", "linalg_norm", "vector_norm", "sqrt", "abs", "cosine_similarity",
                    "pairwise_distance", "mse_loss", "l1_loss", "smooth_l1_loss", "normalize", "sum_to_size", "clamp_min", "expand_as", "rsub", "stack", "cosine_embedding_loss"}
"""Operations of a loss that only draws embeddings together: no margin, no softmax over others, no spread to be kept."""
THROUGH = VIEWS | {"normalize", "div", "mul", "add", "sub", "relu"}


@rule("embedding-collapse", "signal")
def check(window: Window, *, point: float = 0.06, close: float = 0.3, shrunk: float = 0.4, unlearned: float = 0.3, long: float = 0.02,
          gone: float = 0.15, empty: float = 0.02) -> Iterator[Finding]:
    """All embeddings fall onto one point.

    **What it is.** A loss over distances or similarities of embeddings (triplet, contrastive, SimSiam) has a trivial answer: the same embedding for every sample.
    It is reached when nothing pushes samples apart (negatives, a margin or the stop-gradient are missing), or when steps are so long that the embeddings fall into it.

    **How it is seen.** In the samples of the layers that make the embeddings, the deviation over the batch relative to all values. A loss
    that, by the recorded program, holds comparisons of two embeddings of one model (or of its moving average) and nothing else (no margin, no softmax, no variance, no data):
    the spread fell below `close` and to less than `shrunk` of its start. Any other comparison of embeddings: below `point` and `shrunk`, while the loss fell by less than `unlearned`;
    or below twice `point` and `gone` of its start, while the loss went below `empty` of its own (a margin that is never active).

    **Why it matters.** The loss may look perfect, or rest at its margin; the embeddings say nothing about the samples.

    **What to do.** Put the missing part back: `detach()` on the target branch, negatives or a margin, a variance term. Otherwise a smaller learning rate and a warm-up.

    **When this is wrong.** Embeddings that draw together at first and separate later recover their spread; consistency terms beside a supervised loss hold an anchor and are not judged.

    **Source.** Schroff et al., FaceNet (2015) on triplets at the margin; Chen & He, SimSiam (2021) on the stop-gradient; Bardes et al., VICReg (2022).
    """
    line = curve(window)
    if line is None:
        return
    for meeting in meetings(window):
        for module in meeting.makers:
            spread = spreads(window, module)
            if spread is None:
                continue
            start, late, n = spread
            falls = late < shrunk * start
            alone = meeting.alone and late < close and falls
            stuck = late < point and falls and line.one_sign and line.fall < unlearned and (meeting.op.name in NAMED or not meeting.alone)
            vanished = late < 2 * point and late < gone * start and line.one_sign and line.late < empty * line.start and (meeting.op.name in NAMED or meeting.op.name == "sub") and not meeting.anchored
            if alone or stuck or vanished:
                yield say(window, meeting, module, start, late, n, alone, line, np.inf if vanished else long, close if alone else point)
                return


@dataclass(frozen=True)
class Meeting:
    """Two embeddings compared in the loss. ``makers``: modules that made them; ``alone``: the loss only draws embeddings together;
    ``anchored``: something else in it holds them."""

    op: Op
    makers: tuple[int, ...]
    alone: bool
    anchored: bool = False


def meetings(window: Window) -> Iterator[Meeting]:
    sampled = {int(m) for m in np.unique(window.stream("activations")["module"])}
    known = parameters(window)
    follows = any(f.get("changed") for f in window.facts("shadow"))  # a moving copy's parameters are in no trained root
    averaged = {t.uid for trace in window.traces for t in trace.tensors if t.uid >= 0 and t.uid not in known} if follows else set()
    for run in passes(window):
        tensors = run.trace.tensors
        found = []
        for op in run.operations:
            carrying = [t for t in op.ins if tensors[t].requires_grad and tensors[t].uid < 0]
            wide = [t for t in carrying if len(tensors[t].shape) >= 2 and tensors[t].shape[-1] > 1]
            twin = wide and own_copy(run, op, wide[0], averaged)
            both = twin or len(wide) >= 2 or (op.name in ("cdist", "matmul", "mm", "sub", "triplet_margin_loss") and len(op.ins) >= 2 and len(carrying) >= 2)
            if op.name not in COMPARES or not both or weights_after(run, op):
                continue
            makers = tuple(dict.fromkeys(m for t in wide or carrying for m in (maker(run, t, op, sampled),) if m is not None))
            if makers and (twin or shared(run, carrying, op)):
                found.append((op, makers))
        if found:
            fixed = anchored(run, averaged)
            whole = all(o.name in ATTRACTS for op, _ in found for o in between(run, op)) and all(op.name in ATTRACTS for op, _ in found) and not fixed
            for op, makers in found:
                yield Meeting(op, makers, whole, fixed)


def between(run: Pass, op: Op) -> list[Op]:
    """Operations from a comparison to the loss."""
    return [run.trace.ops[i] for i in sorted(run.trace.forward(op.outs)) if i in run.needed and i < run.backward.index]


def weights_after(run: Pass, op: Op) -> bool:
    return any(run.trace.tensors[t].uid >= 0 and run.trace.tensors[t].requires_grad for o in between(run, op) for t in o.ins)


def own_copy(run: Pass, op: Op, tid: int, averaged: set[int]) -> bool:
    """The other side, without gradient, comes from the same weights or from an average of them: no data, and it moves along."""
    tensors = run.trace.tensors
    own = weights(run, tid, op)
    others = [t for t in op.ins if t != tid and not tensors[t].requires_grad and len(tensors[t].shape) >= 2 and tensors[t].shape[-1] > 1]
    return any(found & (own | averaged) for found in (weights(run, t, op) for t in others))


def weights(run: Pass, tid: int, op: Op) -> set[int]:
    """Uids of the parameters that a tensor depends on."""
    made = run.trace.producer(tid, op.index)
    return {run.trace.tensors[t].uid for o in (made, *run.trace.back(made)) for t in o.ins if run.trace.tensors[t].uid >= 0} if made is not None else set()


def held(run: Pass, op: Op, averaged: set[int]) -> bool:
    """A difference from something that does not move along with the embeddings."""
    made = [t for t in op.ins if run.trace.tensors[t].requires_grad]
    return "residual" in op.values and not (made and own_copy(run, op, made[0], averaged))


def anchored(run: Pass, averaged: set[int]) -> bool:
    """Something else holds the outputs: a difference from data, a criterion with labels, a determinant, a variance."""
    return any(held(run, o, averaged) or (o.name in ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "var", "std", "logdet", "kl_div",
                                                    "exp", "logsumexp", "softmax", "log_softmax", "logsigmoid", "softplus", "var_mean", "std_mean", "cov")
               and (run.trace.tensors[o.outs[0]].requires_grad if o.outs else False)) for o in run.operations)


def maker(run: Pass, tid: int, op: Op, sampled: set[int]) -> int | None:
    """The sampled module whose output is compared, looking through normalisations."""
    here = run.trace.producer(tid, op.index)
    for _ in range(12):
        if here is None:
            return None
        if here.module in sampled and here.name not in THROUGH:
            return here.module
        here = run.trace.producer(here.ins[0], here.index) if here.ins else None
    return None


def shared(run: Pass, tids: list[int], op: Op) -> bool:
    """Both sides come from the same weights (one tensor against itself included)."""
    sets = [weights(run, tid, op) for tid in tids[:3]]
    return bool(sets) and bool(set.intersection(*sets))


def spreads(window: Window, module: int) -> tuple[float, float, int] | None:
    """(start, late, samples) of the spread over the batch at a module's output."""
    rows = window.stream("activations")
    rows = rows[(rows["module"] == module) & np.isfinite(rows["row_spread"])]
    if len(np.unique(rows["step"])) < 3 or window.n_steps < 20 or rows["step"].max() < 0.2 * window.n_steps:
        return None
    first, last = rows["step"].min(), rows["step"].max()
    tail = rows[rows["step"] >= max(0.6 * last, first + 1)]
    return float(np.median(rows["row_spread"][rows["step"] == first])), float(np.median(tail["row_spread"])), len(rows)


def say(window: Window, meeting: Meeting, module: int, start: float, late: float, n: int, alone: bool, line: Curve, long: float, limit: float) -> Finding:
    move, made = motion(window), optimizer(window)
    ratio = float(np.median(move.ratio[: max(3, len(move.ratio) // 3)])) if move is not None and len(move.ratio) else 0.0
    fast = not alone and ratio > long and made is not None and made.at is not None
    at: Location | None = made.at if fast and made is not None else meeting.op.at
    name = str(modules(window).get(module, {}).get("name") or modules(window).get(module, {}).get("class") or "the encoder")
    fix = ("Nothing pushes embeddings apart: detach the target branch behind a predictor, or add negatives, a margin or a variance term at {line}." if alone
           else "Lower the learning rate at {line} (or warm up), and check the margin." if fast
           else "Check margin, negatives and stop-gradient at {line}; lower the learning rate or warm up.")
    return Finding(
        "embedding-collapse", "measured", "harmful", f"The embeddings of {name} fall together: their spread went from {start:.2g} to {late:.2g}",
        fix.format(line=quoted(window, at, "the loss")), Where.at(at, module=name, also=(str(meeting.op.at),) if meeting.op.at is not None and meeting.op.at != at else ()),
        first_step=1, last_step=window.n_steps,
        evidence=(Evidence(f"deviation over the batch relative to all values at the output of {name}: {start:.3g} at the start, {late:.3g} late", "activations/row_spread", late, limit, n),
                  Evidence("the loss draws embeddings of one model together, and does nothing else" if alone
                           else f"the loss went from {line.start:.4g} to {line.late:.4g}; a step changed the weights by {ratio:.2g} of their norm", "trace" if alone else "steps/loss",
                           None if alone else line.fall, None, line.n)),
        treatment="lr-down" if fast else None, explains=("dead-units", "loss-plateau", "lr-too-high", "lr-too-low", "vanishing-gradients"))
