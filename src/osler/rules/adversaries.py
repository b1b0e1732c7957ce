"""Objectives that only make sense together: generator and discriminator, actor and critic, positives and negatives."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules import script
from osler.rules.objective import Expander, Objective, Term
from osler.rules.objective_names import LIBRARIES, Place
from osler.rules.terms import base, constructed, meaning, meanings

JUDGE = re.compile(r"^(d|disc|discriminator|critic|netd|d_net|dis|dnet|score_net|d_model)$", re.I)
CRITIC = re.compile(r"^(q\d?|q\d?_forward|critic\d?|qf\d?|q_?net\d?|critic_?net\d?|q_?func(tion)?|value_?net)$", re.I)
ACTOR = re.compile(r"actor|policy|^pi$|^mu$|^act|new_action|pred_action|pi_action", re.I)
FAKE = re.compile(r"fake|gen|^g$|netg|^x_?hat$|synth|sample|^g_", re.I)
REAL = re.compile(r"real|^x$|^xb$|data|true|batch|imgs?$|^images$", re.I)
ONES, ZEROS = re.compile(r"ones|real_label|valid|^real$|true_label|^one|label_real|real_target", re.I), re.compile(r"zeros|fake_label|^fake$|^zero|label_fake|fake_target", re.I)
POSITIVE, NEGATIVE = re.compile(r"(^|_)(pos(itive)?|p|ap|chosen|win(ner)?|good|w)(_|$|\d)|positive", re.I), re.compile(r"(^|_)(neg(ative)?|n|an|rejected|lose(r)?|bad|l)(_|$|\d)|negative", re.I)
DISTANCE = re.compile(r"dist|norm|^d_|^d[pn]$|pow|square|cdist|euclid", re.I)
SIMILAR = re.compile(r"sim|cos|score|dot|logit|reward|^s_|rank|logp|utility", re.I)


SAME = re.compile(r"^(same|similar|is_same|match|matched|positive|together|y_same|same_class)$", re.I)


@dataclass(frozen=True)
class Push:
    """What an objective does to a judge's output for one input: +1 if minimising raises it."""

    judge: str
    argument: str
    way: int
    at: Location


def wrong(window: Window, expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """``(title, fix, line, evidence)`` of the first objective that works against its own purpose."""
    return actor(expander, found) or pairs(expander, found) or ranked(expander, found) or scores(expander, found) or by_hand(expander, found) or generator(expander, found)


def argument_text(expander: Expander, node: ast.expr, place: Place, depth: int = 3) -> str:
    """Names an argument is made of, a few assignments back."""
    words = script.words(node)
    for n in ast.walk(node):
        if depth and isinstance(n, ast.Name):
            for inner, where, _ in expander.expand(n.id, place) or ():
                words |= set(argument_text(expander, inner, where, depth - 1).split())
    return " ".join(sorted(words))


def judged(term: Term, pattern: re.Pattern[str]) -> ast.Call | None:
    node = term.node
    if isinstance(node, ast.Call) and node.args and pattern.search(node.func.attr if isinstance(node.func, ast.Attribute) else script.dotted(node.func) or ""):
        return node
    return None


def actor(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """An actor that minimises the value its critic gives to its own actions."""
    for objective in found:
        others = [t for t in objective.terms if not isinstance(t.node, ast.Constant)]
        for term in objective.terms:
            node = judged(term, CRITIC)
            if node is None or term.sign < 0 or term.factors or any(isinstance(t.node, ast.BinOp) for t in others):
                continue
            acts = " ".join(argument_text(expander, a, term.place) for a in node.args)
            learned = [w for w in acts.split() if ACTOR.search(w)]
            if learned and not re.search(r"target|next|detach|no_grad", acts) and len([t for t in others if judged(t, CRITIC)]) <= 2 and all(t.sign > 0 for t in others if judged(t, CRITIC)):
                return ("The actor minimises the value of its own actions", "Minimise -critic(state, actor(state)).mean().", term.at,
                        f"the actor's objective rises with `{ast.unparse(node)[:80]}`")
    return None


def pairs(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """A margin or ranking loss in which what belongs together and what does not have changed places."""
    for objective in found:
        sides: dict[str, list[Term]] = {"positive": [], "negative": []}
        for term in objective.terms:
            if not {"relu", "clamp", "softplus", "logsigmoid", "sigmoid", "clamp_min", "maximum", "max", "exp"} & set(term.through):
                continue
            words = names_of(expander, term)
            positive, negative = any(POSITIVE.search(w) for w in words), any(NEGATIVE.search(w) for w in words)
            if positive != negative:
                sides["positive" if positive else "negative"].append(term)
        if len(sides["positive"]) == 1 == len(sides["negative"]):
            plus, minus = sides["positive"][0], sides["negative"][0]
            if plus.sign == minus.sign or plus.through[-1:] == ("logsumexp",):
                continue
            kind = closeness(expander, plus)
            if kind is not None and plus.sign != kind:
                what = "distance" if kind > 0 else "score"
                return (f"Positives and negatives have changed places: the loss {'falls' if plus.sign < 0 else 'rises'} with the {what} of positives",
                        "The loss must rise with the distance of positives (fall with their score), and the other way round for negatives.", Location(plus.place.file, plus.node.lineno),
                        f"`{ast.unparse(plus.node)[:70]}` enters with {'minus' if plus.sign < 0 else 'plus'}, `{ast.unparse(minus.node)[:70]}` with {'minus' if minus.sign < 0 else 'plus'}")
    return None


def ranked(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """Ranking losses of torch whose arguments have changed places, and a contrastive loss whose label picks the other branch."""
    for objective in found:
        for term in objective.terms:
            node = term.node
            if isinstance(node, ast.Call) and len(node.args) >= 3 and term.sign > 0:
                name = script.call_name(node) + " " + (constructed(expander, node, term.place) or "")
                first, second, third = (argument_name(a) for a in node.args[:3])
                if re.search(r"triplet", name, re.I) and NEGATIVE.search(second) and POSITIVE.search(third):
                    return ("The triplet loss gets the negative where it wants the positive", "The order is (anchor, positive, negative).", term.at, f"`{ast.unparse(node)[:90]}`")
                if re.search(r"margin_?ranking", name, re.I):
                    way = aim(expander, node.args[2], term.place)
                    kind = 1 if DISTANCE.search(first) else -1
                    high = 1 if POSITIVE.search(first) and NEGATIVE.search(second) else -1 if NEGATIVE.search(first) and POSITIVE.search(second) else 0
                    if way and high and high * way == kind:
                        return ("The ranking loss puts negatives above positives", "With a target of 1 the first argument is ranked higher: pass (positive, negative).", term.at, f"`{ast.unparse(node)[:90]}`")
            same = [f for f in term.factors if isinstance(f, ast.Name) and SAME.search(f.id)]
            rest = [f for f in term.factors if f not in same]
            if len(same) == 1 and len(rest) == 1 and term.sign > 0:
                inner = ast.parse(base(rest[0]), mode="eval").body
                for leaf in expander.walk(inner, term.place, depth=6):
                    words = {*script.words(leaf.node), *leaf.trail[-1:]}
                    if {"relu", "clamp"} & set(leaf.through) and leaf.sign < 0 and any(DISTANCE.search(w) or w == "d" for w in words):
                        return ("The contrastive loss pushes pairs of one class apart", "Pairs that belong together get the squared distance, the others the margin.", term.at,
                                f"`{same[0].id}` multiplies the margin term")
    return None


def argument_name(node: ast.expr) -> str:
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    return (script.dotted(node) or script.root(node) or "").rsplit(".", 1)[-1]


def scores(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """Distances (or negated similarities) handed to a softmax as if the largest were the best."""
    for objective in found:
        for term in objective.terms:
            node = term.node
            if not isinstance(node, ast.Call) or (script.call_name(node) not in ("cross_entropy", "log_softmax") and "CrossEntropy" not in (constructed(expander, node, term.place) or "")):
                continue
            library = script.call_name(node) != "log_softmax" or not isinstance(node.func, ast.Attribute) or (isinstance(node.func.value, ast.Name) and node.func.value.id in LIBRARIES)
            given = node.args[0] if library and node.args else node.func.value if isinstance(node.func, ast.Attribute) else None
            for leaf in expander.walk(given, term.place, depth=8) if given is not None else ():
                kind = {m.kind for m in meaning(expander, leaf)}
                if leaf.sign > 0 and ((isinstance(leaf.node, ast.Call) and script.call_name(leaf.node) in ("cdist", "pairwise_distance", "norm")) or "square" in kind):
                    return ("Distances are used as scores: the farthest class gets the highest probability", "Use the negative distance: cross_entropy(-distance, target).", leaf.at if leaf.place.file == objective.at.file else term.at,
                            f"`{ast.unparse(leaf.node)[:80]}` enters the softmax with plus")
                if leaf.sign < 0 and ("similarity" in kind or (isinstance(leaf.node, ast.BinOp) and isinstance(leaf.node.op, ast.MatMult)
                                                               and ".T" in ast.unparse(leaf.node) and not re.search(r"weight|\bW\b", ast.unparse(leaf.node)))):
                    return ("Negated similarities are used as scores: what belongs together gets the lowest probability", "Drop the minus before the similarity.",
                            Location(leaf.place.file, leaf.flipped or leaf.node.lineno), f"`{ast.unparse(leaf.node)[:80]}` enters the softmax with minus")
    return None


def by_hand(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """An update written out that climbs: ``p += lr * p.grad``."""
    if any(m.want and m.term.sign != m.want for o in found for m in meanings(expander, o.terms) if m.kind in ("loss", "square", "loglik", "policy")) \
            or not any(m.kind in ("loss", "square", "loglik") for o in found for m in meanings(expander, o.terms)):
        return None
    for file in expander.window.sources:
        module = script.tree(expander.window, file)
        for node in ast.walk(module) if module is not None else ():
            climbed: ast.expr | None = None
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and has_grad(node.value) == root_of(node.target) and not negative(node.value):
                climbed = node.target
            elif isinstance(node, ast.Call) and script.call_name(node) == "add_" and node.args and isinstance(node.func, ast.Attribute):
                alpha = next((k.value for k in node.keywords if k.arg == "alpha"), None)
                if has_grad(node.args[0]) == root_of(node.func.value) and not negative(node.args[0]) and not (alpha is not None and negative(alpha)):
                    climbed = node.func.value
            if climbed is not None and has_grad(climbed) is None and expander.did_run(file, node) and not re.search(r"^(x|delta|adv|img|image|inp|input|noise|z|perturb)", root_of(climbed) or "x", re.I):
                return ("The update climbs the loss: the gradient is added", "Subtract it: p -= lr * p.grad.", Location(file, int(getattr(node, "lineno", 1))), f"`{ast.unparse(node)[:80]}`")
    return None


def root_of(node: ast.expr) -> str | None:
    found = script.root(node)
    return found.split(".")[0] if found is not None and not found.startswith("self.") else found


def has_grad(node: ast.expr) -> str | None:
    """The variable whose ``.grad`` an expression uses as it is."""
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and n.attr == "grad":
            return None if "sign" in script.words(node) else root_of(n.value)
    return None


def negative(node: ast.expr) -> bool:
    return any(isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub) for n in ast.walk(node))


def names_of(expander: Expander, term: Term) -> set[str]:
    return {w for w in (*script.words(term.node), *term.trail[-2:]) if not re.fullmatch(r"p|torch|F|n|w|l|dim|keepdim|_?norm", w)}


def closeness(expander: Expander, term: Term) -> int | None:
    """+1 if a term is a distance, -1 if it is a similarity or score."""
    words = set(script.words(term.node)) | set(term.trail[-2:])
    if any(SIMILAR.search(w) for w in words if w in term.trail):
        return -1
    if any(DISTANCE.search(w) for w in words - {"pow", "square"}):
        return 1
    if any(m.kind == "square" for m in meaning(expander, term)):
        return 1
    if any(SIMILAR.search(w) for w in words) or term.factors or (isinstance(term.node, ast.BinOp) and isinstance(term.node.op, ast.MatMult)):
        return -1
    return None


def here(objective: Objective, term: Term) -> Location:
    """The line of the objective's own function through which a term enters it."""
    scope = objective.place.scope
    if term.place.scope is scope:
        return term.at
    last = getattr(scope, "end_lineno", None) or 10**9
    inside = [at for _, _, at in term.uses if at.file == objective.place.file and getattr(scope, "lineno", 0) <= at.line <= last]
    return inside[-1] if inside else term.at


def judge_name(term: Term, node: ast.Call | None = None) -> str:
    made = node if node is not None else judged(term, JUDGE)
    return ast.unparse(made.func).rsplit(".", 1)[-1].lower() if made is not None else ""


def aim(expander: Expander, node: ast.expr, place: Place, depth: int = 3) -> int | None:
    """+1 for a target of ones, -1 for one of zeros."""
    if isinstance(node, ast.Call):
        name = script.call_name(node)
        if name in ("ones", "ones_like", "new_ones"):
            return 1
        if name in ("zeros", "zeros_like", "new_zeros"):
            return -1
        if name in ("full", "full_like") and len(node.args) > 1:
            return aim(expander, node.args[1], place, depth)
        return aim(expander, node.func.value, place, depth) if isinstance(node.func, ast.Attribute) and depth else None
    value = expander.constant(node, place)
    if value is not None:
        return 1 if value > 0.5 else -1
    name = script.dotted(node) or ""
    filled = [c for c in script.calls(place.scope, "fill_") if isinstance(c.func, ast.Attribute) and script.dotted(c.func.value) == name and c.lineno < place.before and c.args] if name else []
    made = expander.assignments(name, place) if name else []
    if filled and depth and (not made or filled[-1].lineno > made[-1].lineno):
        return aim(expander, max(filled, key=lambda c: c.lineno).args[0], place, depth - 1)
    for inner, where, _ in (expander.expand(name, place) or ()) if name and depth else ():
        found = aim(expander, inner, where, depth - 1)
        if found is not None:
            return found
    short = name.rsplit(".", 1)[-1]
    return 1 if ONES.search(short) else -1 if ZEROS.search(short) else None


def pushes(expander: Expander, objective: Objective) -> list[Push]:
    found = []
    for term in objective.terms:
        node, way = judged(term, JUDGE), -term.sign
        if node is None and isinstance(term.node, ast.Call) and term.node.args:
            inner = term.node.args[0]
            place = term.place
            leaf = next((t for t in expander.walk(inner, place, depth=6) if judged(t, JUDGE) is not None), None)
            level = aim(expander, term.node.args[1], place) if len(term.node.args) > 1 else None
            if script.call_name(term.node) == "log":
                leaf = next((t for t in expander.walk(ast.parse(base(term.node), mode="eval").body, place, depth=6) if judged(t, JUDGE) is not None), None)
                if leaf is not None:
                    found.append(Push(judge_name(leaf), argument_text(expander, judged(leaf, JUDGE).args[0], leaf.place), -term.sign * leaf.sign, term.at))  # type: ignore[union-attr]
                continue
            if leaf is None or level is None or not re.search(r"bce|loss|crit|binary_cross|mse|adv", ast.unparse(term.node.func), re.I):
                continue
            node, way = judged(leaf, JUDGE), level * term.sign
        if node is not None:
            found.append(Push(judge_name(term, node), argument_text(expander, node.args[0], term.place), way, here(objective, term)))
    return found


def generator(expander: Expander, found: Sequence[Objective]) -> tuple[str, str, Location, str] | None:
    """The generator pushes its fakes the way the discriminator pushes them too."""
    every = [pushes(expander, o) for o in found]
    lowered: list[Push] = []
    raised: list[Push] = []
    for both in every:
        fake = [p for p in both if fakes(p)]
        real = [p for p in both if p not in fake]
        if len(fake) == 1 and real and len({p.way for p in real}) == 1:
            if fake[0].way == real[0].way:
                return ("The discriminator pushes real and generated samples the same way", "Give real and generated samples opposite targets (or signs).", fake[0].at,
                        "real and generated samples enter its objective with the same sign")
            lowered.append(fake[0])
        elif len(both) == 1 and fake:
            (lowered if "detach" in fake[0].argument.split() else raised).append(fake[0])
    for mine in lowered:
        for other in raised:
            if other.judge == mine.judge and other.way == mine.way:
                at = other.at if mine.way < 0 else mine.at
                return ("Generator and discriminator push the scores of generated samples the same way", "The generator must raise what the discriminator lowers: give one of them the other sign (or target).",
                        at, f"both objectives {'lower' if mine.way < 0 else 'raise'} the score of generated samples")
    return None


def fakes(push: Push) -> bool:
    return any(FAKE.search(w) for w in push.argument.split())
