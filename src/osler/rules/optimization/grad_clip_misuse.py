from __future__ import annotations

import ast
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import LOUD, Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, in_turn, loaded, motion, newest, optimizer, parameters
from osler.rules.schedules import backwards_taken, steps_taken
from osler.rules.script import around, call_name, calls, tree
from osler.rules.values import argument, call_at, decided, keyword_line

SCALED = ("SGD", "ASGD", "Adadelta", "Rprop", "SGDW")
"""Optimizers whose step is as long as the gradient."""


@rule("grad-clip-misuse", "optimization")
def check(window: Window, *, factor: float = 8.0, stuck: float = 0.4, min_calls: int = 10) -> Iterator[Finding | NotChecked]:
    """Gradient clipping at the wrong place, of the wrong thing, or with a threshold far from the gradients.

    **What it is.** Clipping before the backward pass or after the step touches gradients that are not used; clipping the parameters of
    another model, or an empty generator, does nothing; a threshold far below the gradients shortens every step; clipping the
    loss cuts its gradient.

    **How it is seen.** Each call of torch's clipping functions finds gradients that a backward pass has just written, that the step
    has used already, or none; that, and a norm of exactly 0, are facts. A threshold is called too small where nearly every
    call clips, by `factor` or more, the optimizer's step is as long as the gradient (SGD; with Adam a constant factor
    cancels, until the clipped gradients come near eps), and the loss fell by less than `stuck`.

    **Why it matters.** Nothing is held back when gradients explode, or training is slowed down by that factor.

    **What to do.** Clip between backward() and step(), the parameters the optimizer holds, at about the median norm of healthy steps.

    **When this is wrong.** Clipping that is active in every step is ordinary for transformers and recurrent nets under Adam, and for
    normalised gradients: a note at most.

    **Source.** Pascanu et al. 2013; handbook A §11, whose rule to grow threshold and learning rate together (⚠ ×4 each is ×16 for
    a clipped step) is not advised.
    """
    newest_by_line = {(str(f.at), f.get("function")): f for f in window.facts("clip")}
    found: list[Finding] = []
    for f in newest_by_line.values():
        if (f.get("calls") or 0) >= 3 and "fresh" in f.data:
            found += list(_place(window, f, min_calls))
    if not any(f.severity in LOUD for f in found):
        for f in newest_by_line.values():
            found += list(_threshold(window, f, factor, stuck, min_calls))
    if not found:
        found += [*_by_hand(window, factor, stuck), *_loss(window), *_weights(window), *_discarded(window)]
    yield from found
    if not found and window.facts("compile"):
        yield NotChecked("grad-clip-misuse", "clipping inside compiled code is not seen")


def _say(title: str, fix: str, at: Location | None, evidence: tuple[Evidence, ...], severity: str = "harmful", certainty: str = "certain",
         also: tuple[Location | None, ...] = (), treatment: str | None = None) -> Finding:
    return Finding("grad-clip-misuse", certainty, severity, title, fix, Where.at(at, also=tuple(str(a) for a in also if a is not None and a != at)), evidence=evidence,
                   treatment=treatment)


def _place(window: Window, f: Fact, least: int) -> Iterator[Finding]:
    seen = {k: int(f.get(k) or 0) for k in ("fresh", "stale", "absent")}
    total, function = sum(seen.values()), str(f.get("function"))
    calls_made, steps = int(f.get("calls") or 0), sum(steps_taken(window).values())
    if not total or calls_made < min(least, 5) or steps < 5:
        return
    held = {u for m in window.facts("optimizer") for u in m.get("uids") or ()}
    clipped = set(f.get("uids") or ())
    if f.get("parameters") == 0:
        yield _say(f"{function} gets no parameters and clips nothing", "Pass model.parameters() itself: a generator that was used before is empty.", f.at,
                   (Evidence(f"0 parameters in {calls_made} calls", None, 0, 1, calls_made),))
    elif clipped and held and not clipped & held and seen["fresh"] < 0.5 * total:
        yield _say(f"{function} clips parameters that no optimizer holds", "Pass the parameters of the model that is trained.", f.at,
                   (Evidence(f"none of {len(clipped)} clipped tensors belongs to an optimizer; their gradients are empty", None, 0, 1, calls_made),))
    elif not f.get("leaves", True):
        yield _say(f"{function} is given a tensor that is no parameter", "Clip the gradients of model.parameters().", f.at,
                   (Evidence(f"the tensor has no gradient of its own, in {calls_made} calls", None, 0, 1, calls_made),))
    elif seen["stale"] >= 0.8 * total and seen["stale"] >= 3:
        yield _say(f"{function} is called after the step, on gradients that were used already", "Move the call between backward() and step().", f.at,
                   (Evidence(f"{seen['stale']} of {total} calls looked at found the gradients of the step before", None, seen["stale"], 0.8 * total, total),))
    elif seen["absent"] >= 0.8 * total and seen["absent"] >= 3:
        yield _say(f"{function} is called before backward(), where there are no gradients yet", "Move the call between backward() and step().", f.at,
                   (Evidence(f"{seen['absent']} of {total} calls looked at found no gradient", None, seen["absent"], 0.8 * total, total),))
    elif (f.get("calls_per_step") or 1) >= 2 and window.facts("cycle"):
        micro = backwards_taken(window, tuple(steps_taken(window)))
        share = (f.get("clipped") or 0) / max(f.get("measured") or 1, 1)
        if micro >= 1.8 * steps and not in_turn(window):
            yield _say(f"{function} cuts the gradient {f.get('calls_per_step')} times per step, while it is still being summed", "Clip once, right before optimizer.step().", f.at,
                       (Evidence(f"{f.get('calls_per_step')} calls per optimizer step; {share:.0%} of them clipped", None, f.get("calls_per_step"), 1, calls_made),),
                       severity="harmful" if share > 0.5 else "note")


def _drives(window: Window, f: Fact) -> Fact | None:
    """The optimizer that steps the clipped parameters."""
    clipped = set(f.get("uids") or ())
    made = [m for m in window.facts("optimizer") if not clipped or clipped & set(m.get("uids") or ())]
    return made[-1] if made else optimizer(window)


def _threshold(window: Window, f: Fact, factor: float, stuck: float, least: int) -> Iterator[Finding]:
    limit, norm, count = f.get("max_norm"), f.get("median_norm"), int(f.get("calls") or 0)
    if isinstance(limit, int | float) and limit <= 0 and count >= 3:
        yield _say(f"{f.get('function')} has a threshold of {limit:g}: " + ("it turns every gradient around" if limit < 0 else "every gradient becomes zero"),
                   "Set the threshold to about 1.0.", threshold_line(window, f), (Evidence(f"{count} calls", None, float(limit), 0.0, count),), severity="fatal", also=(f.at,))
        return
    if f.get("scaled") or not isinstance(limit, int | float) or not isinstance(norm, int | float) or not limit > 0 or count < least:
        return
    by_value = f.get("function") == "clip_grad_value_"
    cut = float(f.get("factor") or 1.0) if by_value else norm / limit
    often = float(f.get("cut_share") or 0.0) if by_value else (f.get("clipped") or 0) / max(f.get("measured") or 1, 1)
    made = _drives(window, f)
    if made is None:
        return
    where = threshold_line(window, f)
    kind, numel = str(made.get("class")), float(f.get("numel") or 1)
    line = curve(window, 20)
    reached = limit if by_value else limit / np.sqrt(numel)
    slow = kind in SCALED and cut >= factor
    eps = (made.get("defaults") or {}).get("eps")
    lost_in_eps = kind not in SCALED and isinstance(eps, int | float) and eps > 0 and reached < 2 * eps and cut >= factor
    if often >= 0.3 if by_value else often >= 0.9:
        if (slow or lost_in_eps) and line is not None and line.one_sign and not loaded(window) and not in_turn(window) and (
                (line.fall < stuck and _creeps(window, cut, kind)) or (slow and cut >= 30 and line.fall < 0.7 and _creeps(window, cut, kind, 3e-4, 0.1))):
            what = f"every step is shortened {cut:.3g}-fold" if slow else f"clipped gradients are as small as eps ({eps:g})"
            yield _say(f"{f.get('function')} at {limit:g} is far below the gradients (median norm {norm:.3g}): {what}",
                       f"Raise the threshold to about {float(f'{norm:.1g}'):g}, or take clipping out.", where,
                       (Evidence(f"{often:.0%} of " + ("the elements are" if by_value else f"{count} calls") + f" clipped, the norm by a factor of {cut:.3g} (median)",
                                 "clip/norm", cut, factor, count),
                        Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, stuck, line.n)), certainty="measured", also=(f.at,),
                       treatment="clip-off")
            return
        if not by_value and often >= 0.5:
            yield _say(f"{often:.0%} of the steps are clipped (median norm {norm:.3g}, threshold {limit:g})", "Nothing, if the loss falls: steps have the same length then.",
                       where if cut >= factor else f.at,
                       (Evidence(f"{f.get('clipped')} of {f.get('measured')} calls clipped", "clip/norm", often, 0.5, count),), severity="note")
        return
    lost = nonfinite.first(window, "loss", "gradient", "parameter")
    norms = window.steps["grad_norm"][np.isfinite(window.steps["grad_norm"])]
    if not by_value and limit >= 100 and len(norms) >= 5 and limit >= 100 * float(np.median(norms[:max(3, len(norms) // 3)])) and lost is not None:
        yield _say(f"{f.get('function')} at {limit:g} holds nothing back (median norm {norm:.3g})", "Lower the threshold to a few times the median norm.", where,
                   (Evidence(f"{f.get('clipped')} of {count} calls clipped before values became non-finite", "clip/norm", often, None, count),), severity="note")


def threshold_line(window: Window, f: Fact) -> Location | None:
    """Where the threshold was written: the constant, the option of a trainer, or the call."""
    if f.get("lib"):
        return keyword_line(window, "gradient_clip_val", "max_grad_norm", "clip_val", "max_norm", "clip_value") or f.at
    call = call_at(window, f.at, str(f.get("function"))) or call_at(window, f.at)
    name = "clip_value" if f.get("function") == "clip_grad_value_" else "max_norm"
    given = argument(call, name, 1)
    return decided(window, f.at, given) if f.at is not None and given is not None else f.at


def _creeps(window: Window, cut: float, kind: str, short: float = 1e-3, most: float = float("inf")) -> bool:
    """Steps are short against the weights, and would be of ordinary size without the cut."""
    move = motion(window)
    if move is None:
        return most == float("inf")
    ratio = float(np.median(move.ratio))
    return ratio < short and (1e-4 <= ratio * cut <= most or kind not in SCALED)


def _by_hand(window: Window, factor: float, stuck: float) -> Iterator[Finding]:
    """``p.grad.clamp_(-c, c)`` and the like, where every gradient ends at the same small norm."""
    lines = _grad_lines(window)
    line, made, move = curve(window, 30), optimizer(window), motion(window)
    if not lines or line is None or made is None or move is None or not line.one_sign or line.fall > stuck or in_turn(window) or loaded(window):
        return
    norms = newest(window)["grad_norm"].astype(float)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) < 8:
        return
    spread = float(np.median(np.abs(norms - np.median(norms))) / np.median(norms))
    numel = sum(float(np.prod(p.get("shape") or [1])) for p in parameters(window).values() if p.get("optimizer") is not None)
    rms = float(np.median(norms)) / np.sqrt(max(numel, 1.0))
    eps = (made.get("defaults") or {}).get("eps") or 0.0
    kind = str(made.get("class"))
    if spread > 0.02 or float(np.median(move.ratio)) > 3e-4 or not (kind in SCALED or rms < 2 * eps):
        return
    at, limit = lines[-1]
    yield _say(f"Gradients are cut by hand to the same norm {np.median(norms):.3g} in every step, and the weights hardly move", "Raise the threshold, or take clipping out.",
               decided(window, at, limit) if limit is not None else at,
               (Evidence(f"the norm varies by {spread:.1%} over {len(norms)} steps", "steps/grad_norm", spread, 0.02, len(norms)),
                Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, stuck, line.n)), certainty="measured", treatment="clip-off")


def _grad_lines(window: Window) -> list[tuple[Location, ast.expr | None]]:
    """Lines that clamp or scale ``.grad``, with the limit."""
    found: list[tuple[Location, ast.expr | None]] = []
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if isinstance(n, ast.Call) and call_name(n) in ("clamp_", "clamp", "clip", "clip_", "mul_", "div_") and any(
                    isinstance(m, ast.Attribute) and m.attr == "grad" for m in ast.walk(n)):
                limit = argument(n, "max", None) or (n.args[-1] if n.args else None)
                found.append((Location(file, n.lineno), limit if call_name(n).startswith("cl") else None))
            elif isinstance(n, ast.Call) and call_name(n) == "register_hook":
                inner = next((c for c in calls(n, "clamp", "clip", "clamp_")), None)
                if inner is not None:
                    found.append((Location(file, n.lineno), argument(inner, "max", None) or (inner.args[-1] if inner.args else None)))
            elif isinstance(n, ast.AugAssign) and any(isinstance(m, ast.Attribute) and m.attr == "grad" for m in ast.walk(n.target)):
                found.append((Location(file, n.lineno), None))
    return sorted(found, key=lambda r: r[0].line)


def _discarded(window: Window) -> Iterator[Finding]:
    """``p.grad.clamp(-1, 1)`` as a statement: the result is thrown away."""
    for file in window.sources if window.n_steps >= 5 else ():
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and call_name(n.value) in ("clamp", "clip") and not any(k.arg == "out" for k in n.value.keywords) \
                    and any(isinstance(m, ast.Attribute) and m.attr == "grad" for m in (*ast.walk(n.value.func), *[x for a in n.value.args[:1] for x in ast.walk(a)])):
                yield _say(f"`{ast.unparse(n)[:60]}` clips a copy of the gradient and throws it away", "Use the in-place form: clamp_(...).", Location(file, n.lineno),
                           (Evidence("the result of the call is not used, and the gradient stays as it was", None, 0, 1, window.n_steps),))
                return


def _loss(window: Window) -> Iterator[Finding]:
    """The loss itself is clamped, and most steps get no gradient at all."""
    clamped = [f for f in window.facts("backward") if (f.get("chain") or [""])[0] in ("ClampBackward0", "ClampBackward1", "ClampMaxBackward0", "MinimumBackward0")]
    rows = window.layers
    if not clamped or len(rows) < 8:
        return
    steps = np.unique(rows["step"])
    empty = np.array([bool(np.nanmax(rows["grad_norm"][rows["step"] == s]) == 0.0) for s in steps])
    if empty.mean() < 0.2 or empty.sum() < 2:
        return
    at = _clamp_line(window, clamped[-1].at) or clamped[-1].at
    yield _say(f"The loss is clamped before backward(): {empty.mean():.0%} of the steps looked at have no gradient at all", "Clip gradients after backward(), not the loss.", at,
               (Evidence(f"{int(empty.sum())} of {len(steps)} sampled steps with gradients of exactly 0", "layers/grad_norm", float(empty.mean()), 0.2, len(steps)),))


def _clamp_line(window: Window, at: Location | None) -> Location | None:
    if at is None:
        return None
    found = [c.lineno for c in calls(tree(window, at.file), "clamp", "clip", "clamp_", "minimum", "clamp_max") if c.lineno <= at.line]
    return Location(at.file, max(found), at.function) if found else None


def _weights(window: Window) -> Iterator[Finding]:
    """Weights are clamped where gradients were meant: every matrix sits at the limit, and the loss does not fall."""
    line = curve(window, 30)
    if line is None or not line.one_sign or line.fall > 0.3 or in_turn(window):
        return
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if not (isinstance(n, ast.Call) and call_name(n) in ("clamp_", "clip_") and isinstance(n.func, ast.Attribute)):
                continue
            holder = n.func.value
            data = isinstance(holder, ast.Attribute) and holder.attr == "data" and not any(isinstance(m, ast.Attribute) and m.attr == "grad" for m in ast.walk(holder))
            inside = isinstance(holder, ast.Name) and any(isinstance(st, ast.For) and isinstance(st.iter, ast.Call) and call_name(st.iter) == "parameters"
                                                          for st in around(window, Location(file, n.lineno)))
            if not data and not inside:
                continue
            rows = window.layers[np.isfinite(window.layers["weight_norm"])]
            if not len(rows):
                continue
            last = {int(u): float(rows["weight_norm"][rows["param"] == u][-1]) for u in np.unique(rows["param"])}
            first = {int(u): float(rows["weight_norm"][rows["param"] == u][0]) for u in last}
            shrunk = [last[u] / first[u] for u in last if first[u] > 0]
            if not shrunk or float(np.median(shrunk)) > 0.7:
                continue
            yield _say("The weights themselves are clamped, where gradients were meant", "Clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).",
                       Location(file, n.lineno), (Evidence(f"weights shrank to {np.median(shrunk):.2g} of their norm (median), and the loss fell by {line.fall:.0%}", "layers/weight_norm",
                                                           float(np.median(shrunk)), 0.7, len(shrunk)),), certainty="measured")
            return
