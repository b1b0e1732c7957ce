from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import scaling
from osler.rules.script import around, call_name, calls, function_around, place, tree

ERRORS = (
    ("step() has already been called since the last update()", "scaler.step is called again without scaler.update in between", "Call scaler.update() once at the end of every step."),
    ("unscale_() has already been called on this optimizer since the last update()", "unscale_ is called again without scaler.update in between",
     "Call scaler.update() once at the end of every step, and unscale_ only once before it."),
    ("unscale_() is being called after step()", "unscale_ comes after scaler.step", "Unscale before the step."),
    ("No inf checks were recorded prior to update", "scaler.update is called although no scaler.step or unscale_ looked at the gradients",
     "Step with scaler.step(optimizer), not optimizer.step()."),
    ("Attempted step but _scale is None", "scaler.step is called although no loss was ever scaled", "Pass scaler.scale(loss) back instead of the loss."),
    ("Attempted update but _scale is None", "scaler.update is called although no loss was ever scaled", "Pass scaler.scale(loss) back instead of the loss."),
    ("Attempted unscale_ but _scale is None", "unscale_ is called although no loss was ever scaled", "Pass scaler.scale(loss) back instead of the loss."),
    ("No inf checks were recorded for this optimizer", "scaler.step finds no gradients to check", "Pass the scaled loss back before the step."),
)


@rule("amp-scaler-not-updated", "precision")
def check(window: Window, *, builds: int = 3, repeated: float = 1.3, in_a_row: int = 10) -> Iterator[Finding]:
    """The loss scale never adapts: update() is missing, the scaler is built anew, or steps go past it.

    **What it is.** A GradScaler halves its scale after an overflow and doubles it after many clean steps. It cannot when `update()`
    is not called (torch then refuses the second step), when a new scaler is built in every step or epoch, when
    `optimizer.step()` is called beside `scaler.step()` (steps with infinite gradients are no longer skipped), when `update()`
    runs between the steps of two optimizers of one backward pass, or when a scale written by hand is never lowered.

    **How it is seen.** Calls of each scaler are counted, with the steps that its optimizers took beside it and the scale it had.
    Rebuilt: `builds` or more scalers from one line for fewer optimizers. Updated too often: `repeated` updates per scaled loss.

    **Why it matters.** Either every step overflows and is skipped, or gradients underflow, or infinite gradients reach the weights.

    **What to do.** One scaler for the whole run; per iteration `scale(loss).backward()`, `step(optimizer)` for each
    optimizer, then one `update()`.

    **When this is wrong.** A script that trains many models in turn, each with a scaler and an optimizer of its own, is not
    reported; one that shares the optimizer is.

    **Source.** Handbook A §13 (⚠ GradScaler skips, it never rolls back; its growth interval is 2000); PyTorch AMP documentation.
    """
    for e in window.facts("exception"):
        for text, title, fix in ERRORS:
            if text in str(e.get("message")):
                yield Finding("amp-scaler-not-updated", "certain", "fatal", title[0].upper() + title[1:] + ": torch refuses", fix, Where.at(e.at), first_step=e.step,
                              evidence=(Evidence(f"{e.get('type')}: {e.get('message')}", "exception", None, None, 1),), explains=("script-failed", "step-missing-or-rare"),
                              treatment="scaler-update")
                return
    for f in scaling.active(window):
        found = list(one(window, f, builds, repeated, in_a_row))
        yield from found
        if not found:
            yield from unscaled_backward(window, f)
    yield from by_hand(window)


def called_in_loop(window: Window, at: Location | None) -> Location | None:
    """Where a function that only builds the thing at this line is called inside a loop."""
    function = function_around(around(window, at)) if at is not None else None
    if function is None or at is None or any(isinstance(n, ast.For | ast.While) for n in ast.walk(function)):
        return at
    loops = [n for n in ast.walk(tree(window, at.file) or ast.Module([], [])) if isinstance(n, ast.For | ast.While)]
    found = [c.lineno for loop in loops for c in calls(loop, function.name)]
    return Location(at.file, min(found)) if found and len(function.body) <= 3 else at


def one(window: Window, f: Fact, builds: int, repeated: float, in_a_row: int) -> Iterator[Finding]:
    count = {k: int(f.get(k) or 0) for k in ("scales", "steps", "unscales", "updates", "skipped", "longest", "direct", "instances")}
    lines = {k: place(v) for k, v in (f.get("lines") or {}).items()}
    text = ", ".join(f"{count[k]} {k}" for k in ("scales", "unscales", "steps", "updates", "skipped"))

    def finding(certainty: str, severity: str, title: str, fix: str, at: Location | None, text: str = text) -> Finding:
        return Finding("amp-scaler-not-updated", certainty, severity, title, fix, Where.at(at or f.at),
                       evidence=(Evidence(text, "scaler", float(count["updates"]), None, max(1, count["scales"])),), treatment="scaler-update",
                       explains=("step-missing-or-rare", "loss-plateau"))

    if window.final and not count["updates"] and count["scales"] >= 2 and (count["steps"] or count["unscales"]):
        yield finding("certain", "fatal" if count["skipped"] or not window.n_steps else "harmful", "scaler.update() is never called, so the loss scale never adapts",
                      "Call scaler.update() at the end of every step.", lines.get("steps") or lines.get("unscales"))
    elif window.final and count["scales"] >= 2 and count["updates"] * 4 < count["steps"] and count["instances"] == 1 and optimizers(window) < 4:
        yield finding("certain", "harmful", f"scaler.update() is called {count['updates']} times for {count['steps']} steps", "Call scaler.update() after every step.",
                      lines.get("steps"))
    elif count["instances"] >= builds and count["instances"] > optimizers(window) and count["scales"]:
        per = count["scales"] / count["instances"]
        yield finding("certain", "harmful", f"The scaler is built anew every {'step' if per < 2 else f'{per:.0f} steps'}: its scale starts at {f.get('init_scale'):g} each time",
                      "Build one scaler before the loop and keep it (and its state_dict in checkpoints).", called_in_loop(window, f.at), text + f", {count['instances']} scalers from one line")
    elif count["direct"] and (beside := plain_step(window, lines)) is not None:
        yield finding("certain", "harmful", "optimizer.step() is called beside the scaler: steps with infinite gradients are not skipped" if not count["steps"] else
                      "Each gradient is applied twice: by scaler.step() and by optimizer.step()", "Step with scaler.step(optimizer) alone.", beside,
                      text + f", {count['direct']} optimizer steps beside it")
    elif count["unscales"] and not count["steps"] and window.n_steps >= 2 and (beside := plain_step(window, lines)) is not None:
        yield finding("certain", "harmful", "optimizer.step() is called beside the scaler: steps with infinite gradients are not skipped", "Step with scaler.step(optimizer).", beside)
    elif count["scales"] >= 4 and count["updates"] > repeated * count["scales"]:
        yield finding("certain", "harmful", f"scaler.update() is called {count['updates'] / count['scales']:.1f} times per scaled loss, between steps that share one backward pass",
                      "Call scaler.update() once, after the steps of all optimizers.", lines.get("updates"))
    elif count["steps"] >= 40 and count["skipped"] > 0.2 * count["steps"] and int(f.get("growth_interval") or 2000) < 50 and count["longest"] < in_a_row:
        yield finding("measured", "harmful", f"{count['skipped']} of {count['steps']} steps are skipped: the scale grows every {f.get('growth_interval')} steps and overflows again",
                      "Leave growth_interval at its default of 2000.", f.at)
    elif count["scales"] * 4 < count["steps"] and count["scales"] <= 2 and count["steps"] >= 4 and optimizers(window) < 4:
        yield finding("certain", "harmful", f"scaler.step() divides gradients of {count['steps']} steps by a scale that only {count['scales']} losses were multiplied with",
                      "Pass scaler.scale(loss) back in every step.", lines.get("steps"))
    else:
        scales = [s for _, s in f.get("history") or ()]
        if count["longest"] >= in_a_row and len(scales) > 2 and min(scales[-3:]) >= 0.999 * max(scales[:3]) > 0:
            yield finding("certain", "fatal", f"{count['skipped']} of {count['steps']} steps were skipped and the scale stayed at {scales[-1]:g}",
                          "Let update() lower the scale: do not set it to a constant.", lines.get("updates"), text + f"; {count['longest']} skipped in a row, scale {scales[-1]:g}")


def unscaled_backward(window: Window, f: Fact) -> Iterator[Finding]:
    """`scaler.scale(loss)` is computed and thrown away; the plain loss is passed back, and `scaler.step` divides its gradients by the scale."""
    at = place((f.get("lines") or {}).get("scales"))
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None or not f.get("steps"):
        return
    inner = function_around(around(window, at)) or module
    for s in ast.walk(inner):
        if not isinstance(s, ast.Expr | ast.Assign) or s.lineno != at.line or not isinstance(s.value, ast.Call) or call_name(s.value) != "scale":
            continue
        names = {n.id for t in getattr(s, "targets", ()) for n in ast.walk(t) if isinstance(n, ast.Name)}
        given = {n.id for a in s.value.args for n in ast.walk(a) if isinstance(n, ast.Name)}
        backwards = [c for c in calls(inner, "backward") if isinstance(c.func, ast.Attribute)]
        owners = {scaling.last(c.func.value) for c in backwards if isinstance(c.func, ast.Attribute)}
        if (not names or not owners & names) and owners & given and not names & given:
            line = next(c.lineno for c in backwards if isinstance(c.func, ast.Attribute) and scaling.last(c.func.value) in given)
            yield Finding("amp-scaler-not-updated", "certain", "harmful", "The scaled loss is thrown away: scaler.step() divides gradients that were never scaled",
                          "scaler.scale(loss).backward().", Where.at(Location(at.file, line)), treatment="scaler-update", explains=("lr-too-low", "loss-plateau", "params-not-moving"),
                          evidence=(Evidence(f"`{window.line(at.file, at.line).strip()}`, then `{window.line(at.file, line).strip()}`", "source", None, None, 1),))
            return


def optimizers(window: Window) -> int:
    return len({f.get("index") for f in window.facts("optimizer")})


def plain_step(window: Window, lines: dict[str, Location | None]) -> Location | None:
    """The `optimizer.step()` in the function that scales the loss (or anywhere in that file)."""
    at = lines.get("scales")
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None:
        return None
    scalers = scaling.scaler_names(module)
    around_ = function_around(around(window, at))
    for block in [b for b in (around_, module) if b is not None]:
        found = [c for c in calls(block, "step") if isinstance(c.func, ast.Attribute) and scaling.last(c.func.value) not in scalers
                 and not any(w in scaling.last(c.func.value).lower() for w in ("sched", "lr", "warmup"))]
        found = [c for c in found if call_name(c) == "step" and len(c.args) <= 1]
        if found:
            return Location(at.file, min(found, key=lambda c: abs(c.lineno - at.line)).lineno)
    return None


def by_hand(window: Window) -> Iterator[Finding]:
    """A scale written by hand: overflowed steps are skipped, and the scale is never lowered."""
    cycle = window.last("cycle")
    backwards = int(cycle.get("backwards") or 0) if cycle is not None else 0
    for h in scaling.hand_scales(window):
        module = tree(window, h.file)
        if h.changes or module is None or backwards < 10 or window.n_steps * 2 > backwards:
            continue
        guard = next((s for s in ast.walk(module) if isinstance(s, ast.If) and any(call_name(c) in ("isfinite", "isinf", "isnan") for c in calls(s.test))), None)
        skip = guard or next((s for s in ast.walk(module) if isinstance(s, ast.If) and any(isinstance(b, ast.Continue) for b in s.body)), None)
        if skip is not None:
            yield Finding("amp-scaler-not-updated", "certain", "fatal", f"{backwards - window.n_steps} of {backwards} steps were skipped and {h.name} is never lowered",
                          f"Halve {h.name} whenever a step overflows, and raise it again after many clean steps.", Where.at(Location(h.file, skip.lineno + len(skip.body) // 2)),
                          evidence=(Evidence(f"{backwards} backward passes, {window.n_steps} steps; {h.name} = {h.value} is assigned once", "cycle", float(window.n_steps), backwards / 2, backwards),),
                          explains=("step-missing-or-rare", "loss-plateau"))
