from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import curve, matrices, modules, parameters
from osler.rules.depth import through_time
from osler.rules.script import call_name, calls, parse, place, words

CONSTANT = re.compile(r"^(constant_|fill_|zeros_|ones_|zero_|full|zeros|ones|zeros_like|ones_like)$")
RANDOM = re.compile(r"^(normal_|uniform_|randn|rand|trunc_normal_|normal|uniform|xavier_\w+|kaiming_\w+|orthogonal_|mul_)$")
DIFFERENCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
RECURRENT = re.compile(r"weight_hh")


@rule("bad-init", "signal")
def check(window: Window, *, share: float = 0.5, large: float = 4.0, small: float = 0.05, surprise: float = 3.0, unlearned: float = 0.1, again: float = 1.6,
          deep: float = 2.2) -> Iterator[Finding]:
    """The initial weights are constant, or far too large or too small.

    **What it is.** Constant weights make all units of a layer equal, and they stay equal; weights far from the scale that
    keeps a signal's size let activations saturate, blow up or die out.

    **How it is seen.** From the values before the first step. Constant: at least `share` of the weight matrices hold one value, two of
    them in a row (a zero last layer or residual branch alone is common and harmless). Scale: gain = std · √fan-in (1 keeps the
    size; torch's default is 0.58, He 1.41) above `large` (`deep` in five or more matrices from which a first loss of ten guesses comes) in at least `share` of the matrices with a first loss `surprise` times
    that of a guess (first predictions as many times the targets' size) or no learning, for recurrent weights above `again`; or below `small` in three or more with no learning.

    **Why it matters.** A network of equal units is one unit; a saturated or silent one has no gradient.

    **What to do.** `kaiming_normal_` before ReLU, `xavier_uniform_` before tanh and sigmoid, or torch's defaults.

    **When this is wrong.** Embeddings, loaded weights and scalars (norm gains, biases) are left out; so are frozen maps.

    **Source.** Handbook A §24; He et al. 2015; AutoTrainer (ICSE 2021).
    """
    known = parameters(window)
    fresh = [u for u in matrices(window) if not known[u].get("loaded") and not known[u].get("stepped") and known[u].get("requires_grad")
             and min(known[u]["shape"][:2]) >= 1 and init(known[u])]
    wide = [u for u in fresh if max(known[u]["shape"][:2]) >= 2]
    if len(wide) < 2:
        return
    constant = [bool(init(known[u]).get("constant")) for u in wide]
    pairs = any(a and b for a, b in pairwise(constant))
    if pairs and sum(constant) >= share * len(wide):
        names = [str(known[u].get("name")) for u, c in zip(wide, constant, strict=True) if c]
        value = init(known[wide[constant.index(True)]]).get("mean")
        yield Finding(
            "bad-init", "certain", "harmful", f"{sum(constant)} of {len(wide)} weight matrices start as a constant ({value})",
            "Initialise weights at random (xavier_uniform_, kaiming_normal_); only biases may start constant.",
            Where.at(written(window, CONSTANT) or owner(window, known[wide[0]]), parameter=names[0]), first_step=0, last_step=0,
            evidence=(Evidence(f"every element of {', '.join(names[:4])} is {value}: all units of a layer are equal and get equal gradients", "params",
                               float(sum(constant)), share * len(wide), len(wide)),), treatment="reinit")
        return
    gains = {u: gain(known[u]) for u in fresh if fan_in(known[u]) >= 4 and not init(known[u]).get("constant") and (init(known[u]).get("std") or 0) > 0}
    line = curve(window)
    failed = line is not None and line.one_sign and line.fall < unlearned
    off = guess(window)
    off = outsized(window) if off is None else off
    repeats = through_time(window)
    recurrent = [u for u, g in gains.items() if g > again and (RECURRENT.search(str(known[u].get("name"))) or repeats.get(u, 0) >= 10)]
    if recurrent and (failed or (off is not None and off > surprise)):
        yield scale(window, recurrent, gains, "large", again, "; they are applied once for every time step" + (f", and the first outputs are {off:.2g} times too large" if off is not None else ""))
        return
    large = deep if off is not None and off >= 10 and len(gains) >= 5 else large
    big = [u for u, g in gains.items() if g > large]
    tiny = [u for u, g in gains.items() if g < small]
    if big and len(big) >= share * len(gains) and ((off is not None and off > surprise) or failed or saturated(window)):
        yield scale(window, big, gains, "large", large, f"; the first loss is {off:.2g} times that of a guess" if off is not None else "")
    elif len(tiny) >= max(3, share * len(gains)) and failed:
        yield scale(window, tiny, gains, "small", small, "; the loss does not fall")


def init(p: dict[str, Any]) -> dict[str, Any]:
    found = p.get("init")
    return found if isinstance(found, dict) else {}


def fan_in(p: dict[str, Any]) -> int:
    return int(np.prod([int(n) for n in p["shape"][1:]]))


def gain(p: dict[str, Any]) -> float:
    return float(init(p)["std"]) * math.sqrt(fan_in(p))


def owner(window: Window, p: dict[str, Any]) -> Location | None:
    return place(modules(window).get(p.get("module", -1), {}).get("at"))


def declared(window: Window, p: dict[str, Any]) -> Location | None:
    """The line of a parameter of the user's own: ``self.W_h = nn.Parameter(torch.randn(...))``, if only one line makes one of that name."""
    name = "self." + str(p.get("name")).split(".")[-1]
    found = [Location(file, s.lineno) for file, text in window.sources.items() for s in ast.walk(parse(text) or ast.Module([], []))
             if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and call_name(s.value) == "Parameter" and any(ast.unparse(t) == name for t in s.targets)
             and any(RANDOM.match(call_name(c)) for c in calls(s.value))]
    return found[0] if len(found) == 1 else None


def guess(window: Window) -> float | None:
    """First training loss over the loss of equal probabilities, for cross entropy over classes."""
    for f in window.facts("criterion"):
        shape = list((f.get("input") or {}).get("shape") or [])
        if f.get("function") in ("cross_entropy", "CrossEntropyLoss") and len(shape) >= 2 and shape[1] > 1 and f.get("value_first") is not None \
                and f.get("reduction", "mean") == "mean":
            return float(f["value_first"]) / math.log(shape[1])
    return None


def outsized(window: Window) -> float | None:
    """Size of the first predictions over that of the targets, for losses of a difference."""
    for f in window.facts("criterion"):
        first = f.get("prediction_first")
        if f.get("function") in DIFFERENCES and f.get("phase", 0) == 0 and isinstance(first, dict) and f.get("target_std") is not None:
            target = max(float(f["target_std"]), abs(float(f.get("target_mean") or 0.0)))
            return max(float(first.get("std") or 0.0), abs(float(first.get("mean") or 0.0))) / target if target > 0 else None
    return None


def saturated(window: Window) -> bool:
    rows = window.stream("activations")["saturated_share"]
    return bool(len(rows) and np.nanmax(rows[:10], initial=0.0) > 0.5)


def written(window: Window, pattern: re.Pattern[str]) -> Location | None:
    """The line that sets weights in the user's text: a call of that kind that mentions a weight, or one in an init function."""
    found: list[tuple[int, str, int]] = []
    for file, text in window.sources.items():
        module = parse(text)
        for statement in (n for n in ast.walk(module) if isinstance(n, ast.Expr | ast.Assign)) if module is not None else ():
            for call in calls(statement):
                if pattern.match(call_name(call)):
                    said = words(statement)
                    weight = any("weight" in w.lower() or w in ("p", "w", "W", "param") for w in said)
                    known = "init" in said or call_name(call).endswith("_") or "Parameter" in said
                    if weight and known:
                        found.append((0 if any("weight" in w.lower() for w in said) else 1, file, statement.lineno))
    return Location(min(found)[1], min(found)[2]) if found else None


def scale(window: Window, uids: list[int], gains: dict[int, float], word: str, limit: float, also: str) -> Finding:
    known = parameters(window)
    names = ", ".join(f"{known[u].get('name')} {gains[u]:.2g}" for u in uids[:4])
    middle = float(np.median([gains[u] for u in uids]))
    return Finding(
        "bad-init", "measured", "harmful", f"Initial weights are too {word}: gain {middle:.2g} in {len(uids)} of {len(gains)} weight matrices",
        "Initialise to the fan-in: kaiming_normal_ before ReLU, xavier_uniform_ before tanh or sigmoid, or keep torch's defaults.",
        Where.at(declared(window, known[uids[0]]) or written(window, RANDOM) or owner(window, known[uids[0]]), parameter=str(known[uids[0]].get("name"))), first_step=0, last_step=0,
        evidence=(Evidence(f"std times square root of fan-in (1 keeps the size of the signal): {names}{also}", "params", middle, limit, len(uids)),),
        treatment="reinit")
