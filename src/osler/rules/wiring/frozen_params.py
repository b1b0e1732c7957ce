from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import freezing_lines, quoted, spot
from osler.rules.graph_questions import (
    copies,
    count,
    ever_optimized,
    modules,
    numel,
    parameters,
    passes,
    reached,
    shown,
)

NO_GRAPH = "does not require grad and does not have a grad_fn"


@rule("frozen-params", "wiring")
def check(window: Window, *, least_layers: int = 2, least_share: float = 0.02) -> Iterator[Finding]:
    """requires_grad is False on layers that were never trained.

    What it is: a trunk is frozen as if it were pretrained although its weights are fresh; the new head is frozen with the loaded
    trunk; or everything is.
    How it is seen: parameters with requires_grad False whose values look exactly like torch's own initialisation (or all like one
    other usual recipe), which nothing
    loaded and no optimizer ever stepped, on the way from the inputs to layers that learn or to the loss; at least `least_layers` of them
    (or the last layer), with `least_share` of the weights in use.
    Why it matters: the rest learns on top of random features.
    What to do: freeze only what was loaded; leave requires_grad on in everything new.
    When this is wrong: fixed random targets and single random projections are designs: they do not feed the layers that learn, or are one
    layer. Copies kept as teachers are left out.
    Source: torchvision issue 2164.
    """
    known, mods = parameters(window), modules(window)
    refused = any(NO_GRAPH in str(f.get("message")) for f in window.facts("exception"))
    if refused and known and not any(p.get("requires_grad", True) for p in known.values()):
        yield told(window, list(known.values()), "fatal", "every parameter has requires_grad False: backward has nothing to do")
        return
    if not window.final and window.n_steps < 200:
        return
    foreign, served = copies(window), reached(window)
    traced = {t.uid for run in passes(window) for op in run.operations for i in op.ins if (t := run.trace.tensors[i]).uid >= 0}
    frozen = [p for u, p in known.items() if not p.get("requires_grad", True) and u not in served and u in traced and p.get("root", -1) not in foreign
              and not p.get("loaded") and not p.get("stepped")]
    fresh = [p for p in frozen if (p.get("init") or {}).get("default")] or one_recipe(frozen)
    if not fresh:
        return
    layers = {p["module"] for p in fresh}
    share = sum(numel(p["shape"]) for p in fresh) / max(sum(numel(p["shape"]) for u, p in known.items() if u in traced), 1)
    uids = {p["uid"] for p in fresh}
    last = last_layer(window, uids)
    if (len(layers) >= least_layers and share >= least_share and feeds_learning(window, uids)) or last:
        yield told(window, fresh, "harmful", f"{count(len(layers), 'layer')} with fresh random weights {'is' if len(layers) == 1 else 'are'} frozen")
    elif feeds_learning(window, uids):
        yield told(window, fresh, "note", f"{mods.get(fresh[0]['module'], {}).get('name')} is frozen at its random start")


RECIPES: tuple[Callable[[int, int], float], ...] = (
    lambda inputs, outputs: 0.02, lambda inputs, outputs: 0.01, lambda inputs, outputs: math.sqrt(2 / (inputs + outputs)),
    lambda inputs, outputs: math.sqrt(2 / inputs), lambda inputs, outputs: math.sqrt(1 / inputs))
"""Standard deviations that libraries and authors start weights with: transformers, xavier, kaiming, 1 / sqrt(fan in)."""


def one_recipe(frozen: list[dict[str, Any]], least: int = 3, wide: float = 4.0) -> list[dict[str, Any]]:
    """The matrices, if all of them have the spread of one recipe to within what chance allows: training would have moved them apart."""
    matrices = [p for p in frozen if len(p["shape"]) >= 2 and numel(p["shape"]) >= 256]

    def fits(p: dict[str, Any], recipe: Callable[[int, int], float]) -> bool:
        init, n, outputs = p.get("init") or {}, numel(p["shape"]), int(p["shape"][0])
        std, mean, wanted = init.get("std"), init.get("mean"), recipe(numel(p["shape"][1:]), outputs * numel(p["shape"][2:]))
        return std is not None and mean is not None and abs(std / wanted - 1) < wide / math.sqrt(2 * n) and abs(mean) < wide * wanted / math.sqrt(n)

    return matrices if len(matrices) >= least and any(all(fits(p, recipe) for p in matrices) for recipe in RECIPES) else []


def feeds_learning(window: Window, uids: set[int]) -> bool:
    """Values made with the frozen parameters enter operations with parameters that learn, on the way to the loss."""
    learning = ever_optimized(window) & reached(window)
    for run in passes(window):
        after = run.trace.forward({t for op in run.uses(uids) for t in op.outs})
        if any(op.index in after and op.index in run.needed for op in run.uses(learning)):
            return True
    return False


def last_layer(window: Window, uids: set[int]) -> bool:
    """The parameters nearest to the loss are among the frozen ones, behind layers that learn or were loaded."""
    for run in passes(window):
        users = [op for op in run.operations if any(run.trace.tensors[t].uid >= 0 for t in op.ins)]
        if len(users) > 1 and any(run.trace.tensors[t].uid in uids for t in users[-1].ins):
            return any(run.trace.tensors[t].requires_grad for t in users[-1].ins)
    return False


def told(window: Window, frozen: list[dict[str, Any]], severity: str, title: str) -> Finding:
    lines = freezing_lines(window)
    built = spot(modules(window).get(frozen[0]["module"], {}).get("at"))
    place: Location | None = lines[-1] if lines else built
    names = shown((p["name"] for p in frozen), 4)
    return Finding(
        "frozen-params", "certain", severity, title,
        f"Do not freeze {names}: change {quoted(window, place, 'the line that sets requires_grad')}.",
        Where.at(place, parameter=frozen[0]["name"], also=tuple(str(a) for a in [*lines[:-1], built] if a is not None and a != place)), first_step=0,
        evidence=(Evidence(f"{names} have requires_grad False, look like torch's own initialisation, and nothing loaded or trained them", "params/requires_grad",
                           value=float(len(frozen)), threshold=0.0, samples=len(frozen)),),
        treatment="unfreeze", explains=("loss-plateau", "lr-too-low", "unused-module"))
