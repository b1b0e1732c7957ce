from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from osler.core.facts import Fact
from osler.core.finding import LOUD, Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import nonfinite
from osler.rules.curve import curve, in_turn, loaded, matrices, modules, newest, parameters
from osler.rules.decay import decay_of, is_decoupled, pull
from osler.rules.schedules import steps_taken
from osler.rules.values import argument, call_at, decided, unpacked


@rule("optimizer-hyperparams", "optimization")
def check(window: Window, *, force: float = 1.5, stuck: float = 0.4, eps_factor: float = 10.0, min_steps: int = 30) -> Iterator[Finding | NotChecked]:
    """A hyper-parameter of the optimizer other than its learning rate is out of range.

    **What it is.** Weight decay that outweighs the gradient, momentum of 1 or more, betas swapped or too slow, an eps far above the
    gradients, dampening that shuts the gradient out.

    **How it is seen.** As facts where the algebra decides: momentum ≥ 1, dampening ≥ 1, beta1 above beta2, beta1 ≥ 0.999, an
    averaging of squares that never updates, momentum of 0.995 or more that outlasts the run. As measurements with an outcome otherwise: decay times weights is more than `force` times the
    gradient (the step, for AdamW) while the weights shrink and the loss fell by less than `stuck`; eps is `eps_factor` times
    the root mean square of the gradients, and the loss hardly fell.

    **Why it matters.** The step no longer follows the gradient, whatever the learning rate.

    **What to do.** Go back to the optimizer's default for the value named.

    **When this is wrong.** Strong decay, large eps, GAN betas (0.5 or 0 first), momentum 0.99 that work: they are left alone, since the
    loss falls. Decay of biases and norms, and groups whose rates are far apart, are notes.

    **Source.** Kingma and Ba 2015 (beta1 < √beta2); Loshchilov and Hutter 2019; DeepFD (ICSE 2022); handbook B §15.
    """
    taken = steps_taken(window)
    own = newest(window)
    for made in window.facts("optimizer"):
        index = made.get("index")
        if not isinstance(index, int) or taken.get(index, 0) < min_steps:
            continue
        found = list(_facts(window, made, taken[index]))
        if not any(f.severity in LOUD for f in found) and len(own) and index == int(own["optimizer"][-1]) and not in_turn(window):
            found += [*_decay(window, made, force, stuck, min_steps), *_eps(window, made, eps_factor, stuck, min_steps)]
        if not any(f.severity in LOUD for f in found):
            found += _notes(window, made, taken[index])
        yield from found


def _say(window: Window, made: Fact, name: str, title: str, fix: str, evidence: tuple[Evidence, ...], severity: str, certainty: str = "certain",
         treatment: str | None = None) -> Finding:
    call = call_at(window, made.at, str(made.get("class"))) or call_at(window, made.at)
    given = argument(call, name)
    at = made.at
    if at is not None:
        at = decided(window, at, given) if given is not None else unpacked(window, at, call, name) or at
    return Finding("optimizer-hyperparams", certainty, severity, title, fix, Where.at(at, also=(str(made.at),) if made.at != at else ()), evidence=evidence, treatment=treatment)


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _facts(window: Window, made: Fact, steps: int) -> Iterator[Finding]:
    values, kind = made.get("defaults") or {}, str(made.get("class"))
    momentum, dampening, alpha = (_number(values, n) for n in ("momentum", "dampening", "alpha"))
    if momentum is not None and momentum >= 1 and kind in ("SGD", "RMSprop", "SGDW"):
        yield _say(window, made, "momentum", f"Momentum is {momentum:g}: the velocity never fades", "Set momentum to 0.9.",
                   (Evidence(f"each step keeps {momentum:g} of the one before, for {steps} steps", None, momentum, 1.0, steps),), "fatal", treatment="momentum-default")
    elif momentum is not None and momentum >= 0.995 and kind in ("SGD", "RMSprop") and _failed(window):
        yield _say(window, made, "momentum", f"Momentum {momentum:g} multiplies the step by {1 / (1 - momentum):.0f}, and the loss did not come down", "Set momentum to 0.9.",
                   (Evidence(f"gradients are kept for {1 / (1 - momentum):.0f} steps of {steps}", None, momentum, 0.995, steps),), "harmful", "measured", "momentum-default")
    elif momentum is not None and momentum >= 0.995 and kind in ("SGD", "RMSprop") and not dampening and 1 / (1 - momentum) >= steps:
        yield _say(window, made, "momentum", f"Momentum {momentum:g} keeps each gradient for {1 / (1 - momentum):.0f} steps, longer than the whole run of {steps}", "Set momentum to 0.9.",
                   (Evidence("the velocity never settles: steps grow with the number of steps taken, and follow gradients long out of date", None, 1 / (1 - momentum), float(steps), steps),),
                   "harmful", treatment="momentum-default")
    if momentum and dampening is not None and dampening >= 1:
        yield _say(window, made, "dampening", f"Dampening is {dampening:g}: after the first step no gradient enters the velocity", "Leave dampening at 0.",
                   (Evidence(f"the velocity gets 1 - {dampening:g} of each gradient", None, dampening, 1.0, steps),), "fatal", treatment="momentum-default")
    if kind == "RMSprop" and alpha is not None and alpha >= 1:
        yield _say(window, made, "alpha", f"alpha is {alpha:g}: the mean square of the gradients is never updated", "Set alpha to 0.99.",
                   (Evidence("every step is divided by eps alone", None, alpha, 1.0, steps),), "fatal")
    betas = values.get("betas")
    if isinstance(betas, list | tuple) and len(betas) >= 2 and all(isinstance(b, int | float) for b in betas[:2]) and "Adam" in kind:
        yield from _betas(window, made, float(betas[0]), float(betas[1]), steps)
    decay = _number(values, "lr_decay")
    if decay and kind == "Adagrad" and decay * steps > 50 and _failed(window):
        yield _say(window, made, "lr_decay", f"lr_decay {decay:g} has divided the learning rate by {1 + decay * steps:.0f} after {steps} steps", "Leave lr_decay at 0.",
                   (Evidence(f"the rate is lr / (1 + {decay:g} · step)", None, decay * steps, 50, steps),), "harmful", "measured")
    eps, lost = _number(values, "eps"), nonfinite.first(window, "loss", "gradient", "parameter")
    if eps == 0 and lost is not None and not nonfinite.from_data(window, lost) and lost.get("what") == "parameter":
        yield _say(window, made, "eps", "eps is 0: a parameter without gradient is divided by 0", "Leave eps at 1e-8.",
                   (Evidence(f"parameters became non-finite at step {lost.step} while the loss was finite", None, 0.0, None, steps),), "fatal")


def _betas(window: Window, made: Fact, first: float, second: float, steps: int) -> Iterator[Finding]:
    if first > second and first >= 0.95 and second < 0.95:
        yield _say(window, made, "betas", f"betas=({first:g}, {second:g}): the mean is slower than the mean of squares, as if the two were swapped", f"Set betas=({second:g}, {first:g}).",
                   (Evidence(f"the average of gradients spans {1 / (1 - first):.0f} steps, that of their squares {1 / max(1 - second, 1e-9):.0f}", None, first, second, steps),),
                   "harmful", treatment="momentum-default")
    elif first >= 0.999:
        yield _say(window, made, "betas", f"beta1={first:g} averages gradients over {1 / max(1 - first, 1e-12):.0f} steps of {steps}", "Set betas=(0.9, 0.999).",
                   (Evidence("steps follow gradients that are long out of date", None, first, 0.999, steps),), "harmful", treatment="momentum-default")
    elif first >= 0.8 and second <= 0.5:
        yield _say(window, made, "betas", f"beta2={second:g} forgets the squared gradients within two steps, while beta1={first:g} remembers ten", "Set betas=(0.9, 0.999).",
                   (Evidence(f"beta1 is above √beta2 = {second ** 0.5:.2g}, where Adam need not converge", None, first, second ** 0.5, steps),), "harmful", treatment="momentum-default")


def _failed(window: Window, fall: float = 0.3) -> bool:
    """The loss did not come down by a good part, rose, or was lost."""
    line = curve(window)
    return nonfinite.first(window, "loss", "gradient", "parameter") is not None or (line is not None and line.one_sign and line.late > (1 - fall) * line.start)


def _decay(window: Window, made: Fact, force: float, stuck: float, least: int) -> Iterator[Finding]:
    line, found = curve(window, least), pull(window, made)
    if line is None or found is None or not line.one_sign or loaded(window):
        return
    lr = newest(window)["lr"]
    rate = float(np.nanmax(lr)) if len(lr) and np.isfinite(lr).any() else 0.0
    if found.decoupled and rate * found.strength >= 0.1 and found.late >= 1.0:
        yield _say(window, made, "weight_decay", f"Weight decay {found.strength:g} at learning rate {rate:.3g} takes {rate * found.strength:.0%} of each weight away at every step",
                   "Lower weight_decay, to about 1e-2.",
                   (Evidence(f"what is learned is forgotten within {1 / (rate * found.strength):.1f} steps; decay is {found.late:.2g} times the step", "layers/weight_norm", rate * found.strength, 0.1, found.samples),
                    Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, stuck, line.n)), "harmful", "measured", "weight-decay-default")
        return
    if line.fall > stuck:
        if found.force >= 1.0 and line.fall < 0.9:
            yield _say(window, made, "weight_decay", f"Weight decay {found.strength:g} pulls as hard as the gradient early on", "If the loss is slow to fall, lower it.",
                       (Evidence(f"decay is {found.force:.2g} times the " + ("step" if found.decoupled else "gradient") + " (median over weight matrices)", "layers/weight_norm",
                                 found.force, 1.0, found.samples),), "note", "measured")
        return
    momentum = _number(made.get("defaults") or {}, "momentum") or 0.0
    jump = rate * found.strength / (1 - min(momentum, 0.99)) if found.decoupled or "Adam" not in str(made.get("class")) else 0.0
    strong = max(found.force, found.late) >= force and found.force >= 0.3 * force and (found.shrunk <= 0.6 or found.late >= force)
    if not (strong and (found.shrunk < 0.9 or (found.force >= 2 * force and found.samples <= 3))) and jump < 1.0:
        return
    yield _say(window, made, "weight_decay", f"Weight decay {found.strength:g} outweighs the gradient: " + (f"weights shrank to {found.shrunk:.2g} of their norm, and " if found.shrunk < 0.9 else "")
               + f"the loss stayed at {line.late:.3g}",
               "Lower weight_decay, to about " + ("1e-2." if found.decoupled else "1e-4."),
               (Evidence(f"decay is {found.force:.2g} times the " + ("step" if found.decoupled else "gradient") + f" early on and {found.late:.2g} times later (median over weight matrices)",
                         "layers/weight_norm", found.force, force, found.samples),
                Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, stuck, line.n)), "harmful", "measured", "weight-decay-default")


def _eps(window: Window, made: Fact, factor: float, stuck: float, least: int) -> Iterator[Finding]:
    eps, kind = _number(made.get("defaults") or {}, "eps"), str(made.get("class"))
    line = curve(window, least)
    if eps is None or eps <= 1e-7 or not ("Adam" in kind or kind in ("RMSprop", "Adagrad")) or line is None or not line.one_sign or line.fall > stuck or loaded(window):
        return
    shapes = {u: float(np.prod(p.get("shape") or [1])) for u, p in parameters(window).items()}
    rows = window.layers[np.isin(window.layers["param"], matrices(window)) & np.isfinite(window.layers["grad_norm"]) & (window.layers["grad_norm"] > 0)]
    if len(rows) < 4:
        return
    rms = float(np.median(rows["grad_norm"].astype(float) / np.sqrt([shapes.get(int(u), 1.0) for u in rows["param"]])))
    steps = len(np.unique(rows["step"]))
    if eps < factor * rms:
        return
    lr = newest(window)["lr"]
    rate = float(np.nanmax(lr)) if len(lr) and np.isfinite(lr).any() else float("nan")
    ratio = rows["update_norm"].astype(float) / np.maximum(rows["weight_norm"].astype(float), 1e-30)
    if float(np.median(ratio)) > 2e-3:
        return
    yield _say(window, made, "eps", f"eps {eps:g} is {eps / rms:.2g} times the gradients' root mean square: steps are that much shorter than lr={rate:.3g} says",
               "Leave eps at 1e-8.",
               (Evidence(f"root mean square of the gradients {rms:.2g} (median over weight matrices)", "layers/grad_norm", rms, eps / factor, steps),
                Evidence(f"the loss went from {line.start:.4g} to {line.late:.4g}", "steps/loss", line.fall, stuck, line.n)), "harmful", "measured")


def _notes(window: Window, made: Fact, steps: int) -> Iterator[Finding]:
    groups = [g for g in made.get("groups") or () if isinstance(g.get("lr"), int | float) and g["lr"] > 0]
    lrs = [float(g["lr"]) for g in groups]
    if len(lrs) >= 2 and max(lrs) / min(lrs) >= 1000:
        yield _say(window, made, "lr", f"Learning rates of the parameter groups lie {max(lrs) / min(lrs):.0g} times apart", "Check that the slow group is meant to stand nearly still.",
                   (Evidence(f"rates {', '.join(f'{v:.2g}' for v in lrs[:6])}", None, max(lrs) / min(lrs), 1000, len(lrs)),), "note")
    decays, rate = decay_of(made), float(np.nanmax(newest(window)["lr"])) if np.isfinite(newest(window)["lr"]).any() else 0.0
    kinds = {i: str(m.get("class", "")) for i, m in modules(window).items()}
    spared = [(u, p) for u, p in parameters(window).items() if decays.get(u, 0.0) > 0 and (len(p.get("shape") or ()) < 2 or "Norm" in kinds.get(p.get("module", -1), ""))]
    shrink = max((rate * decays[u] * steps for u, _ in spared), default=0.0)
    if spared and shrink >= 0.5 and is_decoupled(made):
        yield _say(window, made, "weight_decay", f"Weight decay acts on {len(spared)} biases and norm weights too", "Give them a group with weight_decay=0.",
                   (Evidence(f"alone it would shrink them by a factor of {np.exp(-min(shrink, 50)):.2g} over {steps} steps", None, shrink, 0.5, len(spared)),), "note")
