from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import adversaries, script
from osler.rules.code_questions import quoted
from osler.rules.graph_questions import criteria
from osler.rules.objective import Expander, Objective, Term, objectives
from osler.rules.terms import LIKELIHOOD, LOSS_NAME, OVERLAP, Meaning, meanings

EXPLAINS = ("loss-diverged", "loss-plateau", "exploding-gradients", "overfit", "lr-too-high", "log-of-zero", "loss-nan", "dead-units", "embedding-collapse", "label-misaligned", "label-noise")
AGAINST = re.compile(r"unlearn|forget|attack|adversar|revers|ascent|ascend|perturb|fool|confus|domain|debias|minimax|min_max|inner_max|virtual|discrepan", re.I)
SAID = {
    "loss": ("a loss is maximised", "Remove the minus: a loss is minimised as it is."),
    "square": ("a squared error is maximised", "Remove the minus: an error is minimised as it is."),
    "loglik": ("a log-likelihood is minimised", "Put a minus before it: minimise the negative log-likelihood."),
    "policy": ("the policy gradient has the wrong sign: actions that paid off become less likely", "Minimise -(log_prob * advantage), with advantage = return - baseline."),
    "entropy": ("the entropy bonus has the wrong sign: exploration is punished", "Subtract the entropy from the loss: loss = policy_loss - coefficient * entropy."),
    "kl": ("a KL divergence is maximised", "Add the KL term to the loss (subtract it only inside an ELBO that is negated afterwards)."),
    "convex": ("the divergence has the wrong sign and is unbounded below", "Check the minus: KL = -0.5 * sum(1 + logvar - mu**2 - exp(logvar))."),
    "similarity": ("the similarity of what belongs together is minimised", "Minimise 1 - similarity, or its negative."),
    "overlap": ("a score that should be high is minimised", "Minimise 1 - score, or its negative."),
}
SURROGATE = re.compile(r"surr|objective|gain", re.I)
SURE = re.compile(r"dice|iou|ssim|psnr|jaccard", re.I)
MAIN = frozenset(("loss", "square", "loglik", "policy", "similarity", "overlap"))


@rule("loss-sign", "optimization")
def check(window: Window, *, share: float = 0.9) -> Iterator[Finding | NotChecked]:
    """The objective has the wrong sign.

    What it is: what should rise is minimised or what should fall is maximised: a negated loss, ``maximize=True`` with a loss, a
    log-likelihood or policy gradient without its minus, a KL, entropy or similarity term with the wrong sign, a generator that helps its
    discriminator, an actor that minimises its critic's value, positives and negatives swapped.
    How it is seen: the expression before ``backward`` is taken apart (through assignments, the user's functions and loss classes); each
    term has a sign, and its function or name says which one it wants. For criterions the sign is measured as well: it is that of
    the gradient that reaches the criterion's value.
    Why it matters: training makes the model worse, the more surely the longer it runs.
    What to do: change the sign named here.
    When this is wrong: adversarial parts, unlearning and attacks maximise losses on purpose, as a second objective beside the first: a
    negated loss is reported only where it is all there is. Losses may be negative (densities, WGAN, contrastive): values prove nothing.
    Source: Williams 1992 (REINFORCE); Kingma & Welling 2014, appendix B; Goodfellow 2014; Arjovsky 2017; torch.optim docs (maximize).
    """
    expander = Expander(window)
    found = objectives(window, expander)
    flips = maximizes(window)
    seen = False
    for objective in found:
        terms = meanings(expander, objective.terms)
        seen = seen or bool(terms)
        wrong = first_wrong(window, expander, objective, terms, -1 if flips is not None else 1, len(found))
        if wrong is not None:
            if flips is not None and wrong.kind in ("loss", "square") and wrong.term.sign > 0:
                yield said(window, objective, wrong, flips, "maximize=True climbs the loss", "Remove maximize=True, or hand the optimizer a quantity that should grow.")
            else:
                yield said(window, objective, wrong, line_of(objective, wrong), *SAID[wrong.kind])
            return
    rival = adversaries.wrong(window, expander, found)
    if rival is not None:
        title, fix, at, evidence = rival
        yield Finding("loss-sign", "certain", "fatal", title, fix, Where.at(at), first_step=0, evidence=(Evidence(evidence, "source", samples=1),), explains=EXPLAINS)
        return
    measured = negated(window, share, len(found))
    if measured is not None:
        yield measured
    elif not seen:
        yield NotChecked("loss-sign", "no term of the objective could be read from the source")


def maximizes(window: Window) -> Location | None:
    """Where the optimizer was told to maximise, if all of them were."""
    made = window.facts("optimizer")
    told = [f for f in made if (f.get("defaults") or {}).get("maximize") is True]
    return told[-1].at if told and len(told) == len(made) else None


def first_wrong(window: Window, expander: Expander, objective: Objective, found: list[Meaning], flip: int, count: int) -> Meaning | None:
    """The term whose sign is wrong in view of the others."""
    kinds = {m.kind for m in found}
    right = [m for m in found if m.want and m.term.sign * flip == m.want]
    wrong = [m for m in found if m.want and m.term.sign * flip == -m.want]
    main = [m for m in right if m.kind in MAIN]
    text = " ".join(window.line(objective.at.file, n) for n in range(max(1, objective.at.line - 12), objective.at.line + 2))
    hostile = AGAINST.search(text) is not None or any(AGAINST.search(f.function) for f in (objective.at,))
    for m in wrong:
        t = m.term
        if m.kind == "policy":
            return m
        if m.kind == "convex" and not hostile:
            return m
        if m.kind == "entropy" and any(r.kind == "policy" for r in right):
            return m
        if hostile or ({"clamp", "relu"} & set(t.through[:3]) and m.kind in ("similarity", "overlap")):
            continue
        if m.kind == "kl" and any(r.kind in ("loss", "square", "loglik", "policy") for r in right):
            return m
        if m.kind in ("loss", "square") and not main and count == 1 and not kinds & {"policy", "score", "product"}:
            return m
        if m.kind == "loglik" and not main and not any(r.kind == "loglik" for r in right) and not kinds & {"policy", "score", "product", "inner", "entropy"} and not sampled(expander, t):
            return m
        if m.kind == "overlap" and SURE.search(" ".join((ast.unparse(t.node), *t.trail))) and not kinds & {"policy", "product"}:
            return m
        if m.kind in ("similarity", "overlap") and not main and not kinds & {"policy", "score", "distance"} and "pow" not in t.through and "abs" not in t.through:
            return m
    return None


def sampled(expander: Expander, term: Term) -> bool:
    """A log-probability of one's own sample (an entropy estimate) is minimised on purpose."""
    given = list(term.node.args) if isinstance(term.node, ast.Call) else [term.node]
    for node in [n for a in given for n in ast.walk(a) if isinstance(n, ast.Name)]:
        given += [inner for inner, _, _ in expander.expand(node.id, term.place) or () if any(re.search(r"sample|get_action|act$|noise|randn", w) for w in script.words(inner))]
    return any(re.search(r"sample|get_action|^act$|^z$|^zs$|noise", n.id if isinstance(n, ast.Name) else n.attr) for a in given for n in ast.walk(a) if isinstance(n, ast.Name | ast.Attribute))


def line_of(objective: Objective, wrong: Meaning) -> Location:
    """The line to change: the minus that is too much, or the term that lacks one."""
    t = wrong.term
    if t.sign < 0 and t.flipped is not None:
        return Location(t.place.file, t.flipped)
    named = LIKELIHOOD if wrong.kind == "loglik" else OVERLAP if wrong.kind == "overlap" else SURROGATE if wrong.kind == "policy" else None
    for name, _, at in t.uses:  # what is rightly named stays as it is; its use lacks the minus
        if named is not None and named.search(name) and not LOSS_NAME.search(name):
            return at
    return t.at


def said(window: Window, objective: Objective, wrong: Meaning, at: Location | None, title: str, fix: str) -> Finding:
    where = Where.at(at, also=(str(objective.at),) if at is not None and objective.at.line != at.line else ())
    text = ast.unparse(wrong.term.node)
    sign = "falls" if wrong.term.sign < 0 else "rises"
    return Finding("loss-sign", "certain", "fatal" if wrong.kind in ("loss", "square", "policy", "loglik") else "harmful", f"{title[0].upper()}{title[1:]}: {quoted(window, at, text[:80])}",
                   fix, where, first_step=0,
                   evidence=(Evidence(f"what is minimised {sign} with `{text[:100]}`" if "maximize" not in title else f"the optimizer climbs, and the objective rises with `{text[:100]}`", "source", value=float(wrong.term.sign),
                                      threshold=float(wrong.want), samples=1),), treatment="loss-sign", explains=EXPLAINS)


def negated(window: Window, share: float, count: int) -> Finding | None:
    """The gradient that reaches the only criterion is negative, and so is the loss."""
    own = [f for f in criteria(window) if f.get("pull")]
    text = "\n".join(window.sources.values())
    loss = window.steps["loss"][np.isfinite(window.steps["loss"])]
    if len(own) != 1 or count > 1 or AGAINST.search(text) or len(window.facts("optimizer")) != 1 or len(loss) < 5 or (loss < 0).mean() < share or own[0].get("function") == "kl_div":
        return None
    pull = own[0]["pull"]
    if pull["n"] < 2 or pull["max"] >= 0:
        return None
    fact = own[0]
    return Finding("loss-sign", "certain", "fatal", f"The {fact.get('function')} is maximised: it enters the objective with a factor of {pull['first']:.3g}",
                   "Remove the minus: a loss is minimised as it is.", Where.at(fact.at), first_step=0,
                   evidence=(Evidence(f"the gradient at the criterion's value was negative in {pull['n']} of {pull['n']} calls looked at", "criterion/pull", value=float(pull["max"]), threshold=0.0,
                                      samples=int(pull["n"])),), treatment="loss-sign", explains=EXPLAINS)
