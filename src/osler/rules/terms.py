"""What the terms of an objective mean: a loss, a likelihood, a similarity, a policy gradient, an entropy, and which sign each wants.

Meaning is read from the functions that are called and, where those end, from names; a term that says nothing has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from osler.rules import script
from osler.rules.graph_questions import CRITERIA
from osler.rules.objective import Expander, Term
from osler.rules.objective_names import LIBRARIES, Place

LOSS_NAME = re.compile(r"loss|criterion|nll|(^|_)(ce|bce|mse|mae|crit)(_|$)|cross_entropy|error$|^err", re.I)
LOGP = re.compile(r"log_?p(rob)?s?(_|$|a|o)|logp|log_pi|logprob|^lps?$|log_?lik|action_log|^lp_", re.I)
REWARD = re.compile(r"reward|returns?$|^ret$|^R$|^G$|^Gs$|^r$|^rs$|^rews?$|payoff|profit|discounted|^gains?$|winnings|utility", re.I)
ADVANTAGE = re.compile(r"advant|^adv|_adv|^a_hat$|^A$|td_?err|^delta|^gae", re.I)
COST = re.compile(r"cost|penalt|regret|latency|tour|makespan|distance", re.I)
VALUE = re.compile(r"value|baseline|critic|^v$|^v_|_v$|^base$|^b$|running|ema|mean", re.I)
TAGGED = re.compile("|".join(p.pattern for p in (REWARD, COST, VALUE)), re.I)
RATIO = re.compile(r"ratio|^rho", re.I)
SIMILARITY = re.compile(r"cosine_similarity|cosinesimilarity|^cos(_?sim)?(ilarity)?$|^cos_|^sims?$|similarity", re.I)
OVERLAP = re.compile(r"(^|_)(dice|iou|jaccard|ssim|psnr|pearson|corr|correlation|r2|f1|auc|overlap|pcc|ccc|snr|sisdr|si_sdr|sdr)(_score|_coef|_coeff|_index)?(_|$)|^inter(section)?$", re.I)
LIKELIHOOD = re.compile(r"log_?lik|likelihood|^elbo$|^ll$|_ll$|^elbo_", re.I)
GAIN = re.compile(r"^(reward|score|accuracy|acc|mi|mutual_info|return)s?$", re.I)
PROBABILITY = re.compile(r"prob|^p$|^ps$|softmax|sigmoid|^pi$|^q$|posterior|^pt$|py|p_y", re.I)
PLAIN = re.compile(r"mask|^m$|valid|weight|^w$|^ws$|_w$|keep|pad|nonpad|is_", re.I)
ENTROPY = re.compile(r"entropy|^ent$|_ent$|^H$", re.I)
KL = re.compile(r"(^|_)kl(d|_?div(ergence)?)?(_|$)", re.I)
DISTANCES = frozenset(("pairwise_distance", "cdist", "norm", "dist", "vector_norm"))


@dataclass(frozen=True)
class Meaning:
    """``want`` is the sign with which the term should enter what is minimised."""

    kind: str
    want: int
    term: Term


def last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def meanings(expander: Expander, terms: Sequence[Term]) -> list[Meaning]:
    found: list[Meaning] = [*unbounded(terms)]
    vague: list[Term] = []
    for term in terms:
        said = meaning(expander, term)
        found += said
        if not any(m.want for m in said):
            vague.append(term)
    clear = {use for m in found if m.want for use in m.term.uses}
    for term in vague:
        for use in term.uses:
            kind = "loglik" if LIKELIHOOD.search(use[0]) else "overlap" if OVERLAP.search(use[0]) else ""
            if kind and use not in clear and not re.search(r"loss|nll|neg|err", use[0], re.I) and not any(m.kind == kind for m in found):
                found.append(Meaning(kind, -1, replace(term, sign=use[1])))
                break
    return found


def unbounded(terms: Sequence[Term]) -> list[Meaning]:
    """``exp(x)`` against ``x`` (or ``x`` against ``log x``, ``logsumexp x`` against ``x``): the faster one needs the plus. This is what
    a Gaussian KL or a Poisson likelihood is made of."""
    for heavy in terms:
        for light in terms:
            if heavy is light or heavy.sign == light.sign or light.place.scope is not heavy.place.scope or heavy.factors:
                continue
            fast, slow = growth(heavy), growth(light)
            factors = {ast.unparse(f) for f in light.factors}
            if fast - slow >= 1 and (base(heavy.node) == base(light.node) or (fast == 2 and factors & set(heavy.trail[-2:]))) and "detach" not in heavy.through:
                return [Meaning("convex", 1, heavy)]
    return []


def growth(term: Term) -> float:
    """How fast a term grows: exp 2, logsumexp 1.5 (its first-order match), plain 0.5, log -1."""
    inner = (term.through[-1:] or ("",))[0]
    if isinstance(term.node, ast.Call) and script.call_name(term.node) == "log":
        return -1.0
    return {"exp": 2.0, "logsumexp": 1.5}.get(inner, 0.5)


def base(node: ast.expr) -> str:
    """Text of an expression; a constant power and a logarithm around it are left out."""
    if isinstance(node, ast.Call) and script.call_name(node) == "log":
        library = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id in LIBRARIES
        inner = node.args[0] if library and node.args else node.func.value if isinstance(node.func, ast.Attribute) else node.args[0] if node.args else node
        return base(inner) if inner is not node else ast.unparse(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.unparse(node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("pow", "square"):
        return ast.unparse(node.func.value)
    return ast.unparse(node)


def meaning(expander: Expander, term: Term) -> list[Meaning]:
    node = term.node
    if term.factors:
        return product(expander, term)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return [Meaning("square" if difference(expander, node.left, term.place) else "penalty", 1, term)]
    if isinstance(node, ast.Call):
        return call(expander, term, node)
    name = script.dotted(node)
    if name is not None:
        return named(term, last(name))
    if isinstance(node, ast.Attribute):
        return named(term, node.attr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return [Meaning("inner", -1, term)]
    return []


def named(term: Term, name: str) -> list[Meaning]:
    for kind, pattern, want in (("entropy", ENTROPY, -1), ("kl", KL, 1), ("loglik", LOGP, -1), ("loglik", LIKELIHOOD, -1), ("similarity", SIMILARITY, -1), ("overlap", OVERLAP, -1)):
        if pattern.search(name) and not (LOSS_NAME.search(name) and kind in ("similarity", "overlap", "loglik")):
            return [Meaning(kind, want, term)]
    if LOSS_NAME.search(name):
        return [Meaning("loss", 1, term)]
    return [Meaning("gain", -1, term)] if GAIN.search(name) else []


def difference(expander: Expander, node: ast.expr, place: Place) -> bool:
    while isinstance(node, ast.Call) and node.args and script.call_name(node) in ("abs", "log", "sqrt"):
        node = node.args[0]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return not isinstance(node.left, ast.Constant) and not isinstance(node.right, ast.Constant)
    name = script.dotted(node)
    if name is not None:
        parts = expander.expand(name, place)
        return bool(parts) and len(parts or ()) == 1 and isinstance((parts or [])[0][0], ast.BinOp) and difference(expander, (parts or [])[0][0], (parts or [])[0][1])
    return False


def call(expander: Expander, term: Term, node: ast.Call) -> list[Meaning]:
    name = script.call_name(node)
    if isinstance(node.func, ast.Call):
        name = script.call_name(node.func)
    if name in ("abs", "square", "pow", "norm", "l1_norm") or name in DISTANCES:
        inner = node.func.value if isinstance(node.func, ast.Attribute) and script.root(node.func) not in (None, "torch", "th", "F", "nn", "np") and name not in DISTANCES - {"norm"} \
            and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F")) else node.args[0] if node.args else None
        if inner is not None and name not in DISTANCES - {"norm"}:
            return [Meaning("square" if difference(expander, inner, term.place) else "penalty", 1, term)]
        return [Meaning("distance", 1, term)]
    if name == "log_prob":
        return [Meaning("loglik", -1, term)]
    if name == "entropy":
        return [Meaning("entropy", -1, term)]
    if name in ("kl_divergence", "kl_div") or KL.search(name):
        return [Meaning("kl", 1, term)]
    if SIMILARITY.search(name):
        return [Meaning("similarity", -1, term)]
    if name in CRITERIA:
        return [Meaning("loss", 1, term)]
    if name == "log_softmax":
        return [Meaning("loglik", -1, term)]
    if name == "log":
        return [Meaning("loglik", -1, term)] if probability(expander, node, term.place) else []
    if name in ("softmax", "sigmoid"):
        return []
    if OVERLAP.search(name) and not LOSS_NAME.search(name):
        return [Meaning("overlap", -1, term)]
    made = constructed(expander, node, term.place)
    if made is not None:
        if SIMILARITY.search(made):
            return [Meaning("similarity", -1, term)]
        if made.endswith("Loss") or LOSS_NAME.search(made):
            return [Meaning("loss", 1, term)]
        return [Meaning("score", 0, term)]
    if LOSS_NAME.search(name):
        return [Meaning("loss", 1, term)]
    if LIKELIHOOD.search(name):
        return [Meaning("loglik", -1, term)]
    return [Meaning("score", 0, term)]


def probability(expander: Expander, node: ast.Call, place: Place) -> bool:
    """Whether a logarithm is taken of a probability, to judge by names and by the functions that made it."""
    words = set(script.words(node)) - {"torch", "log"}
    ratio_of = next((a for a in node.args if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Div)), None)
    if ratio_of is not None and any(w in ("pos", "positive", "pos_sim", "pos_exp", "numerator") for w in script.words(ratio_of.left)):
        return True
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            for inner, _, _ in expander.expand(n.id, place) or ():
                words |= {script.call_name(c) for c in script.calls(inner)}
    return any(PROBABILITY.search(w) for w in words)


def constructed(expander: Expander, node: ast.Call, place: Place) -> str | None:
    """Name of the class that a called object was made of."""
    if isinstance(node.func, ast.Call):
        return script.call_name(node.func)
    name = script.dotted(node.func)
    if name is None or (isinstance(node.func, ast.Attribute) and not name.startswith("self.")):
        return None
    parts = expander.expand(name, place)
    if not parts:
        for _, kind in expander.classes.values():
            for n in ast.walk(kind):
                if isinstance(n, ast.Assign) and name in script.targets(n) and isinstance(n.value, ast.Call):
                    return script.call_name(n.value)
        return None
    value = parts[0][0]
    if isinstance(value, ast.Call):
        return script.call_name(value)
    return last(script.dotted(value) or "") or None


def tags(expander: Expander, node: ast.expr, place: Place, depth: int = 4) -> set[str]:
    """What kinds of quantities an expression is made of."""
    found: set[str] = set()
    for n in ast.walk(node):
        name = n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else None
        if name is None or name in ("torch", "self", "F", "mean", "sum", "std", "detach"):
            continue
        hits = {tag for tag, pattern in (("logp", LOGP), ("reward", REWARD), ("advantage", ADVANTAGE), ("cost", COST), ("ratio", RATIO), ("plain", PLAIN)) if pattern.search(name)}
        if name == "log_softmax":
            hits.add("logp")
        if not hits and depth and isinstance(n, ast.Name):
            for inner, where, _ in expander.expand(name, place) or ():
                hits |= tags(expander, inner, where, depth - 1) - {"plain"}
        found |= hits
    return found


def direction(expander: Expander, node: ast.expr, place: Place) -> int | None:
    """+1 if a factor is large where things went well, -1 where they went badly, ``None`` if its names do not say."""
    expander.stop = TAGGED
    try:
        terms = list(expander.walk(node, place))
    finally:
        expander.stop = None
    for term in terms:
        words = " ".join(last(script.dotted(n) or "") for n in ast.walk(term.node) if isinstance(n, ast.Name | ast.Attribute)).split()
        for word in words:
            if VALUE.search(word) and not REWARD.search(word):
                break
            if REWARD.search(word):
                return term.sign
            if COST.search(word):
                return -term.sign
    name = script.dotted(node) or ""
    if ADVANTAGE.search(last(name)) or REWARD.search(last(name)):
        baselines = [t.sign for t in terms if VALUE.search(last(script.dotted(t.node) or ""))]
        return 1 if not baselines or baselines[0] < 0 or len(terms) == 1 else None
    return None


def product(expander: Expander, term: Term) -> list[Meaning]:
    place = term.place
    marks = [tags(expander, f, place) for f in term.factors]
    acts = [i for i, m in enumerate(marks) if m & {"logp", "ratio"} or ratio(expander, term.factors[i], place)]
    good = [i for i, m in enumerate(marks) if m & {"reward", "advantage", "cost"} and i not in acts[:1]]
    if acts and good:
        way = direction(expander, term.factors[good[0]], place)
        inner = sign_of(expander, term.factors[acts[0]], place)
        return [Meaning("policy", -way * inner, term)] if way is not None else [Meaning("policy", 0, term)]
    leaves = [list(expander.walk(f, place)) for f in term.factors]
    logs = [i for i, found in enumerate(leaves) if (found and any(m.kind == "loglik" for m in meaning(expander, replace(found[0], factors=())))) or (found and is_log(found[0].node))]
    if len(logs) == 2 == len(term.factors) and "exp" in {*leaves[0][0].through, *leaves[1][0].through}:
        return [Meaning("entropy", -1, replace(term, sign=-term.sign))]
    if len(logs) == 1 and len(term.factors) == 2:
        other, logged = leaves[1 - logs[0]], leaves[logs[0]][0]
        if len(leaves[logs[0]]) > 1:
            return [Meaning("product", 0, term)]
        if other and same(other[0], logged):
            return [Meaning("entropy", -1, replace(term, sign=-term.sign * logged.sign))]
        return [Meaning("loglik", -1, replace(term, sign=term.sign * logged.sign))]
    if len(term.factors) == 2 and all(normalised(expander, f, place) for f in term.factors):
        return [Meaning("similarity", -1, term)]
    overlap = [n for n in term.trail if OVERLAP.search(n)]
    if overlap and not any("plain" in m for m in marks):
        return [Meaning("overlap", -1, term)]
    solid = [i for i, found in enumerate(leaves) if len(found) == 1 and any(m.kind in ("loss", "kl", "square", "similarity") for m in meaning(expander, replace(found[0], factors=())))]
    if len(solid) == 1 and all(isinstance(f, ast.Name | ast.Attribute) and not expander.expand(script.dotted(f) or "", place) for i, f in enumerate(term.factors) if i not in solid):
        inner_term = leaves[solid[0]][0]
        return meaning(expander, replace(inner_term, sign=term.sign * inner_term.sign, flipped=inner_term.flipped or term.flipped))
    main = [i for i, m in enumerate(marks) if "plain" not in m]
    if len(main) == 1:
        sub = [replace(t, sign=t.sign * term.sign, factor=t.factor * term.factor, through=(*term.through, *t.through), flipped=t.flipped or term.flipped) for t in leaves[main[0]]]
        return [m for t in sub for m in meaning(expander, t)]
    return [Meaning("product", 0, term)]


def is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and script.call_name(node) in ("log", "log_softmax")


def normalised(expander: Expander, node: ast.expr, place: Place, depth: int = 4) -> bool:
    """Whether a vector was brought to unit length."""
    if any(script.call_name(c) == "normalize" for c in script.calls(node)):
        return True
    name = script.dotted(node)
    return depth > 0 and name is not None and any(normalised(expander, inner, where, depth - 1) for inner, where, _ in expander.expand(name, place) or ())


def same(first: Term, second: Term) -> bool:
    """``p`` and ``log p``: one expression, once plain and once under the logarithm (or the two softmaxes of one input)."""
    if base(first.node) == base(second.node):
        return True
    if isinstance(first.node, ast.Call) and isinstance(second.node, ast.Call):
        names = {script.call_name(first.node), script.call_name(second.node)}
        argument = [ast.unparse(c.args[0]) if c.args and not (isinstance(c.func, ast.Attribute) and script.root(c.func) not in ("torch", "F", None)) else ast.unparse(c.func.value) if isinstance(c.func, ast.Attribute) else ""
                    for c in (first.node, second.node)]
        return names == {"softmax", "log_softmax"} and argument[0] == argument[1]
    return False


def ratio(expander: Expander, node: ast.expr, place: Place) -> bool:
    """``exp(log p - old log p)``, possibly clamped."""
    return any("exp" in t.through and tags(expander, t.node, place, 2) & {"logp"} for t in expander.walk(node, place, depth=6))


def sign_of(expander: Expander, node: ast.expr, place: Place) -> int:
    """-1 where a factor is itself a negated log-probability (a cross entropy per row)."""
    found = list(expander.walk(node, place, depth=8))
    calls = [t for t in found if isinstance(t.node, ast.Call) and script.call_name(t.node) in ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")]
    if calls:
        return -calls[0].sign
    return found[0].sign if found else 1
