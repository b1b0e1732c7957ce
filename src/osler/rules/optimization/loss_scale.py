from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, in_turn, motion, optimizer
from osler.rules.graph_questions import criteria, loss_built
from osler.rules.objective import Expander, Objective, Term, objectives
from osler.rules.terms import meanings

EXPLAINS = ("lr-too-high", "lr-too-low", "loss-plateau", "loss-diverged", "loss-nan", "dead-units", "exploding-gradients", "vanishing-gradients", "embedding-collapse",
            "grad-clip-misuse", "optimizer-hyperparams")
SENSITIVE = re.compile(r"^(sgd|asgd|nag|momentum|nesterov)|sgd$", re.I)
HEALED = re.compile(r"\.grad\.(data\.)?(div_|mul_)|\.grad(\.data)?\s*(/=|\*=)|\.grad\s*=\s*[^=\n]*\.grad\s*[*/]|unscale_|_foreach_(mul|div)_", re.I)


@dataclass(frozen=True)
class Scale:
    """By what factor a step's gradient differs from that of the mean loss over its batch, and where that comes from."""

    factor: float
    why: str
    at: Location | None
    fix: str
    also: tuple[str, ...] = ()


@rule("loss-scale", "optimization")
def check(window: Window, *, large: float = 7.0, stuck: float = 0.6, long: float = 0.05, overshoot: float = 2.0, slow: float = 0.8, short: float = 1e-3, drowned: float = 0.05,
          unmoved: float = 0.9, collapse: float = 0.03, beta: float = 30.0, bonus: float = 1.0, min_steps: int = 20) -> Iterator[Finding]:
    """The loss is wrong by a large factor.

    What it is: a sum where the rate is meant for a mean, gradients accumulated without dividing by their number, a loss divided twice or
    multiplied by the size of the batch or the data set, or a term whose weight drowns the others (a KL summed over the batch beside
    a reconstruction that is a mean, a penalty a thousand times too strong).
    How it is seen: the factor with which the criterion's value enters the gradient of one step (measured at its node, times the backward
    passes of a step, times the elements of a sum) is `large` times too large or small, *and* the run suffers: lost, or stuck above
    `stuck` of its start with steps longer than `long` of the weights (or at half of that, with steps that promise `overshoot` times the whole loss); or hardly moving (above `slow`, steps below `short`). Only optimizers
    whose steps grow with the gradient (SGD) can suffer; Adam divides any factor out. For terms: the main criterion makes up less
    than `drowned` of the first objective and stays above `unmoved` of its start; or a Gaussian KL that outweighs the reconstruction
    by more than `beta` has gone to `collapse` of it; or an entropy bonus weighs `bonus` times the policy gradient.
    Why it matters: the learning rate that the script states is not the one that acts.
    What to do: divide by what was summed over, once; give every term the same reduction.
    When this is wrong: a sum with a rate chosen for it is fine and not reported as long as the loss falls.
    Source: PyTorch forum "gradient accumulation: divide the loss"; transformers #34191 (num_items_in_batch); Higgins 2017 (beta-VAE).
    """
    if window.n_steps < 2:
        return
    expander = Expander(window)
    found = objectives(window, expander)
    yield from terms_out_of_balance(window, expander, found, drowned, unmoved, collapse, beta)
    heavy = entropy_first(expander, found, bonus)
    if heavy is not None:
        yield heavy
    made = optimizer(window)
    if made is None or not SENSITIVE.search(str(made.get("class", ""))) or in_turn(window) or window.facts("scaler") or HEALED.search("\n".join(window.sources.values())):
        return
    scale = measured(window, found) or written(window, expander, found)
    if scale is None:
        return
    if scale.factor >= large and not clipped(window):
        harm = hurt(window, stuck, long, overshoot, min_steps)
        if harm is not None:
            yield claim(scale, "fatal", f"The loss is {scale.factor:.3g} times too large: {scale.why}", harm)
    elif scale.factor <= 1 / large:
        harm = crawls(window, slow, short, min_steps)
        if harm is not None:
            yield claim(scale, "harmful", f"The loss is {1 / scale.factor:.3g} times too small: {scale.why}", harm)


def claim(scale: Scale, severity: str, title: str, harm: Evidence) -> Finding:
    return Finding("loss-scale", "measured", severity, title, scale.fix, Where.at(scale.at, also=scale.also), first_step=0,
                   evidence=(harm, Evidence(scale.why, "criterion/pull", value=scale.factor, threshold=1.0, samples=1)), treatment="loss-mean", explains=EXPLAINS)


def per_step(window: Window) -> int:
    """Backward passes of one step from the same line (several losses with a line each are no accumulation)."""
    rows = window.steps
    lines = {(f.at.file, f.at.line) for f in window.facts("backward") if f.at is not None}
    k = int(np.median(rows["backwards"])) if len(rows) else 1
    return max(1, k // max(1, len(lines)))


def measured(window: Window, found: list[Objective]) -> Scale | None:
    """From the gradient at the node of the only training criterion."""
    own = [f for f in criteria(window) if f.get("pull")]
    if len(own) != 1:
        return None
    fact = own[0]
    pull, k = abs(float(fact["pull"]["first"])), per_step(window)
    shape = list((fact.get("input") or {}).get("shape") or ())
    target = list((fact.get("target") or {}).get("shape") or shape)
    elements = int(np.prod(target or [1])) if fact.get("function") in ("cross_entropy", "nll_loss") and "int" in str((fact.get("target") or {}).get("dtype")) else int(np.prod(shape or [1]))
    if fact.get("reduction") == "batchmean":
        return None
    total = fact.get("reduction") == "sum"
    together = calls_together(window, fact)
    factor = pull * k * together * (elements if total else 1)
    if fact.get("function") == "kl_div" and fact.get("reduction") in ("mean", None) and len(shape) > 1:
        factor /= shape[-1]
    at, built = fact.at, loss_built(window, fact)
    also = (str(at),) if at is not None and at != built else ()
    rows = max(1, shape[0]) if shape else 1
    if total and abs(np.log(max(pull * rows, 1e-12))) < 0.1:  # summed over features, averaged over the batch
        return None
    if factor <= 0:
        return None
    if total and pull > 0.5:
        return Scale(factor, f"{fact.get('function')} sums over {elements} elements" + (f", {k} times a step" if k > 1 else ""), built,
                     'Use reduction="mean", or divide the learning rate by the number of summed elements.', also)
    summed = fact.get("reduction") == "none" and abs(np.log(max(pull, 1e-9) / elements)) < 0.2 and elements > 1
    place = scaled_at(found) or at
    if summed:
        return Scale(factor, f"the losses of {elements} elements are summed", reduced_at(found) or place, "Take the mean instead of the sum.", also)
    if k > 1 and pull > 0.5:
        user = found[0].at if found and not any(f.lib for f in window.facts("backward")) else at
        return Scale(factor, f"{k} backward passes add up in one step, each with the full loss", user, f"Divide each loss by the number of accumulated batches ({k}).", also)
    if together > 1 and pull > 0.5:
        return Scale(factor, f"{together} losses are added up for one backward pass", reduced_at(found) or place, f"Divide the sum by the number of losses ({together}).", also)
    return Scale(factor, f"{fact.get('function')} enters the gradient of one step with a factor of {factor:.3g}", place,
                 "Take the mean over the batch once, and drop the extra factor or division.", also) if not 0.2 < factor < 5 else None


def calls_together(window: Window, fact: Fact) -> int:
    """How many calls of one criterion line feed one backward pass (a loss at each time step)."""
    for trace in window.traces:
        count = 0
        for op in trace.ops:
            if op.name == fact.get("function") and op.grad and op.at is not None and fact.at is not None and op.at.line == fact.at.line:
                count += 1
            elif op.name == "@backward" and count:
                return count
    return 1


def scaled_at(found: list[Objective]) -> Location | None:
    """The line of a factor or divisor of the objective."""
    for objective in found:
        for term in objective.terms:
            if term.scaled is not None:
                return Location(term.place.file, term.scaled)
    return None


def reduced_at(found: list[Objective]) -> Location | None:
    for objective in found:
        for term in objective.terms:
            if "sum" in term.through:
                return term.reduced or term.at
    return None


def written(window: Window, expander: Expander, found: list[Objective]) -> Scale | None:
    """A loss without a criterion: a sum over rows that nothing divides, or several undivided backward passes of one step."""
    if any(f.get("pull") for f in criteria(window)) or len(found) != 1:
        return None
    objective = found[0]
    main = [m.term for m in meanings(expander, objective.terms) if m.kind in ("loss", "square", "loglik", "similarity", "overlap", "convex")]
    rows = window.stream("batches")
    train = rows[rows["phase"] == 0]
    size = int(np.median(train["size"])) if len(train) else traced_rows(window)
    k = per_step(window)
    if not main:
        return None
    if all("sum" in t.through and "mean" not in t.through and not t.divisors and t.factor >= 0.4 for t in main) and size > 1 and not row_sum(main[0]):
        return Scale(float(size * k), f"the loss is a sum over the {size} rows of a batch (and whatever else it is summed over)", main[0].reduced or main[0].at,
                     "Divide by the number of rows: take the mean over the batch.", (str(objective.at),))
    if k > 1 and all(not t.divisors and t.factor >= 0.4 for t in main):
        return Scale(float(k), f"{k} backward passes add up in one step, each with the full loss", objective.at, f"Divide each loss by the number of accumulated batches ({k}).")
    divided = [t for t in main if any(re.search(r"len\(|size|shape|numel|batch|accum|steps", ast.unparse(d)) for d in t.divisors) and "mean" in t.through]
    if divided and size > 1 and k == 1:
        t = divided[0]
        return Scale(1.0 / size, f"a mean is divided again by `{ast.unparse(t.divisors[-1])}`", Location(t.place.file, t.scaled) if t.scaled else t.at, "Take the mean once.", (str(objective.at),))
    return None


def row_sum(term: Term) -> bool:
    """A sum of squares over features that is averaged elsewhere by name."""
    return any("mean" in name for name in term.trail)


def traced_rows(window: Window) -> int:
    for trace in window.traces:
        for op in trace.named("sum"):
            shape = trace.tensors[op.ins[0]].shape if op.ins else ()
            if shape and shape[0] > 1 and op.grad:
                return int(shape[0])
    return 0


def clipped(window: Window) -> bool:
    """Whether almost every step was clipped: the factor is gone then."""
    return any(f.get("calls") and f.get("position") == "after backward" and (f.get("clipped") or 0) > 0.7 * f["calls"] for f in window.facts("clip"))


def hurt(window: Window, stuck: float, long: float, overshoot: float, min_steps: int) -> Evidence | None:
    """The run was lost, or sits high with steps that are long for the weights."""
    lost = nonfinite.first(window, "loss", "gradient", "parameter")
    if lost is not None and not nonfinite.from_data(window, lost):
        return Evidence(f"values became non-finite after {lost.step} steps", "steps/loss", value=float(lost.step), samples=len(window.steps))
    line, move = curve(window, min_steps), motion(window)
    if line is None or line.start == 0:
        return None
    level, peak = line.late / abs(line.first if line.first else line.start), float(line.loss.max()) / abs(line.first if line.first else line.start)
    early = move.ratio[: max(3, len(move.ratio) // 3)] if move is not None else np.empty(0)
    ratio = float(np.max(early)) if len(early) else 0.0
    usual = float(np.median(move.ratio)) if move is not None else 0.0
    over = float(np.median(move.promise / np.maximum(np.abs(np.interp(move.steps, line.steps, line.loss)), 1e-12))) if move is not None else 0.0
    high = level >= stuck and (ratio >= long or level >= 1.5 or peak > 5)
    rough = level >= stuck / 2 and ((peak > 3 and line.noise > 0.1 * line.late and ratio >= long) or (usual >= 1.6 * long and over >= overshoot))
    if not high and not rough:
        return None
    return Evidence(f"the loss ends at {level:.2g} of its start; steps change the weights by {usual:.2g} of their norm (early ones by up to {ratio:.2g}) and promise {over:.2g} times the whole loss",
                    "steps/loss", value=level, threshold=stuck, samples=line.n)


def crawls(window: Window, slow: float, short: float, min_steps: int) -> Evidence | None:
    line, move = curve(window, min_steps), motion(window)
    if line is None or move is None or line.start <= 0 or line.n < 25:
        return None
    level, ratio = line.late / line.start, float(np.median(move.ratio))
    if level >= slow and ratio < short:
        return Evidence(f"the loss is still at {level:.2g} of its start after {line.n} steps; a step changes the weights by {ratio:.2g} of their norm", "layers/update_norm", value=ratio,
                        threshold=short, samples=line.n)
    return None


def terms_out_of_balance(window: Window, expander: Expander, found: list[Objective], drowned: float, unmoved: float, collapse: float, beta: float) -> Iterator[Finding]:
    """One term so heavy that the main criterion is not learned."""
    own = [f for f in criteria(window) if f.get("pull") and np.isfinite(float(f.get("value_first") or np.nan))]
    loss = window.steps["loss"][np.isfinite(window.steps["loss"])].astype(float)
    if not own or len(loss) < 40 or in_turn(window) or window.facts("scaler") or len({int(i) for i in np.unique(window.steps["optimizer"])}) != 1:
        return
    for fact in own:
        values = window.calls
        values = values[(values["criterion"] == fact.get("index")) & (values["phase"] == 0) & np.isfinite(values["value"])]["value"].astype(float)
        pull = float(fact["pull"]["first"])
        if len(values) < 10 or pull <= 0 or len(found) != 1:
            continue
        first, late = float(np.median(values[:3])), float(np.median(values[-max(5, len(values) // 10):]))
        total, last = float(np.median(loss[:3])), float(np.median(loss[-max(5, len(loss) // 10):]))
        rest = last - pull * late
        if first <= 0 or total <= 0:
            continue
        heavy = heaviest(found[0], fact) or bare_sum(window, own, fact)
        share = pull * first / total
        if share < drowned and pull > 0.99 and late >= unmoved * first and total > 0 and heavy is not None:
            yield Finding("loss-scale", "measured", "harmful", f"{fact.get('function')} is drowned: it makes up {share:.2%} of the objective at the start, and does not fall",
                          "Bring the terms to one scale: lower the weight of the heavy term, or give it the reduction of the others.", Where.at(heavy, also=(str(fact.at),)), first_step=0,
                          evidence=(Evidence(f"{fact.get('function')} went from {first:.4g} to {late:.4g} while the objective went from {total:.4g} to {last:.4g}", "calls/value", value=share,
                                             threshold=drowned, samples=len(values)),), explains=EXPLAINS)
            return
        kl = divergence(expander, found[0])
        if kl is None or fact.get("reduction") not in ("mean", "sum", None) or fact.get("function") in ("cross_entropy", "nll_loss"):
            continue
        shape = list((fact.get("input") or {}).get("shape") or (1,))
        features, rows = int(np.prod(shape[1:] or [1])), shape[0]
        whole = "mean" not in kl.through and not kl.divisors  # summed over the batch too
        summed = fact.get("reduction") == "sum"
        weight = kl.factor / 0.5 * (rows if whole else 1) / (pull * rows if summed else pull / features)
        if "sum" in kl.through and not kl.guessed and weight >= beta and rest <= collapse * abs(pull * late):
            at = kl.reduced or kl.at
            yield Finding("loss-scale", "measured", "harmful", f"The KL term weighs {weight:.3g} times too much beside a reconstruction that is a {'sum' if summed else 'mean'} over {features} features: it went to zero",
                          'Sum the reconstruction over its features as well (reduction="sum", divided by the batch size), or weight the KL down.', Where.at(at, also=(str(fact.at),)),
                          first_step=0, evidence=(Evidence(f"at the end the KL term is {max(rest, 0.0):.3g} beside a reconstruction of {late:.4g}: the latent code is not used", "steps/loss",
                                                           value=rest / max(abs(late), 1e-12), threshold=collapse, samples=len(loss)),), explains=EXPLAINS)
            return


def entropy_first(expander: Expander, found: list[Objective], bonus: float) -> Finding | None:
    """An entropy bonus as heavy as the policy gradient itself."""
    for objective in found:
        said = meanings(expander, objective.terms)
        acts = [m.term for m in said if m.kind == "policy"]
        for m in said:
            if acts and m.kind == "entropy" and m.term.sign < 0 and not m.term.guessed and m.term.factor >= bonus * max(1.0, acts[0].factor):
                return Finding("loss-scale", "certain", "harmful", f"The entropy bonus has the weight {m.term.factor:.3g}: the policy is kept random", "Use a coefficient of 0.001 to 0.05.",
                               Where.at(Location(m.term.place.file, m.term.scaled) if m.term.scaled else m.term.at), first_step=0,
                               evidence=(Evidence(f"`{ast.unparse(m.term.node)[:60]}` is weighted {m.term.factor:.3g}, the policy gradient {acts[0].factor:.3g}", "source", value=m.term.factor, threshold=bonus,
                                                  samples=1),), explains=EXPLAINS)
    return None


def heaviest(objective: Objective, fact: Fact) -> Location | None:
    """Line of the term that is made heavy in the text: by the largest factor (of 5 or more), or as a bare sum."""
    others = [t for t in objective.terms if fact.at is None or t.node.lineno != fact.at.line or t.factor > 1]
    weighty = [t for t in others if t.factor >= 5 and t.scaled is not None]
    if weighty:
        t = max(weighty, key=lambda t: t.factor)
        return Location(t.place.file, t.scaled or t.node.lineno)
    sums = [t for t in others if "sum" in t.through and "mean" not in t.through]
    if sums:
        return sums[0].reduced or sums[0].at
    return None


def bare_sum(window: Window, own: list[Fact], fact: Fact) -> Location | None:
    """Where another criterion of the objective was built or called that sums over its elements, while this one takes a mean."""
    if fact.get("reduction") != "mean":
        return None
    others = [f for f in own if f.get("index") != fact.get("index") and f.get("reduction") == "sum" and float(f["pull"]["first"]) > 0.2]
    return loss_built(window, others[0]) if len(others) == 1 else None


def divergence(expander: Expander, objective: Objective) -> Term | None:
    return next((m.term for m in meanings(expander, objective.terms) if m.kind in ("convex", "kl") and m.term.sign > 0), None)
