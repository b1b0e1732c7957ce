from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules import scaling
from osler.rules.script import call_name, calls, place, root, words

DECIDES = ("mul_", "div_", "clamp_", "copy_", "sub_", "add_", "clamp")
FIX = "Call scaler.unscale_(optimizer) once after the backward pass and before gradients are clipped or looked at; scaler.step does not unscale a second time."


@rule("amp-unscale-missing", "precision")
def check(window: Window, *, least_scale: float = 8.0) -> Iterator[Finding]:
    """Gradients are clipped, inspected or applied while they still carry the loss scale.

    **What it is.** Between the backward pass of a scaled loss and the step every gradient is larger by the scale, thousands of
    times as a rule. Clipping there, a norm that decides on skipping, a gradient penalty, a plain `optimizer.step()` all take
    the scaled numbers for the real ones.

    **How it is seen.** A clipping call ran while a scaled loss had been passed back and no `unscale_` had come since; or the text
    of the loop reads gradients there (norms, `clamp_`, a penalty from `autograd.grad`) without dividing by the scale; or
    the optimizer steps on gradients that nobody ever unscales. With several optimizers each one has its own `unscale_`. A scale
    written by hand, `(loss * 1024).backward()`, counts from `least_scale` on.

    **Why it matters.** With a threshold of 1 and a scale of 2^14 the clipped gradient has norm 1/2^14 after unscaling: training
    stands still. Applied without unscaling, the step is thousands of times too long.

    **What to do.** `scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(...); scaler.step(optimizer);
    scaler.update()`. By hand: divide the gradients by the scale first.

    **When this is wrong.** A threshold that is multiplied by the scale on purpose, under a name that does not say so.

    **Source.** Handbook A §13; PyTorch AMP examples (gradient clipping, gradient penalty); pytorch issue 40907.
    """
    said: set[tuple[str, int]] = set()
    live = scaling.active(window)
    for finding in (*clipped(window), *(by_text(window) if live else ()), *(other_optimizer(window) if live else ()), *penalty(window), *applied(window),
                    *by_hand(window, least_scale)):
        key = (str(finding.where.file), int(finding.where.line or 0))
        if key not in said:
            said.add(key)
            yield finding


def clipped(window: Window) -> Iterator[Finding]:
    """The clip tap saw it: scaled at the call."""
    newest = {f"{f.at}|{f.get('function')}": f for f in window.facts("clip")}
    for f in newest.values():
        if not f.get("scaled") or f.get("position") == "before backward":
            continue
        text = window.line(f.at.file, f.at.line) if f.at is not None else ""
        given = [a for c in _calls(window, f.at) if call_name(c) in scaling.CLIPS for a in [*c.args[1:], *(k.value for k in c.keywords)]]
        if any(scaling.SCALE.search(w) or "get_scale" in w for a in given for w in words(a)):
            continue
        norm, limit = f.get("median_norm"), f.get("max_norm")
        figure = f" (median norm {norm:.3g} against a limit of {limit:.3g})" if isinstance(norm, float) and isinstance(limit, int | float) and norm == norm else ""
        yield Finding("amp-unscale-missing", "certain", "harmful", f"Gradients are clipped while they still carry the loss scale{figure}", FIX, Where.at(f.at),
                      first_step=f.step, evidence=(Evidence(f"{f.get('calls')} calls of {f.get('function')} between the scaled backward pass and unscale_: `{text.strip()}`", "clip",
                                                            norm if isinstance(norm, float) else None, float(limit) if isinstance(limit, int | float) else None,
                                                            int(f.get("calls") or 1)),), treatment="unscale-before-clip")


def _calls(window: Window, at: Location | None) -> list[ast.Call]:
    from osler.rules.code_questions import calls_at
    return calls_at(window, at)


def pending(found: list[scaling.Event] | tuple[scaling.Event, ...], hand: bool) -> Iterator[scaling.Event]:
    """Clips and uses of gradients between a scaled backward pass and the next unscaling or step."""
    open_ = False
    for e in found:
        if e.kind == "scale" and e.by_hand is hand:
            open_ = True
        elif e.kind in ("unscale", "scaler-step", "step", "update", "clear"):
            open_ = False
        elif open_ and e.kind in ("clip", "use"):
            yield e


def by_text(window: Window) -> Iterator[Finding]:
    """Gradients read by hand between the scaled backward pass and the step of a torch scaler."""
    for file, module, found in scaling.scopes(window):
        for e in pending(found, hand=False):
            if e.kind == "use" and scaling.ran(window, file, e.line, getattr(e.node, "end_lineno", e.line)):
                acts = changes(module, e)
                yield Finding("amp-unscale-missing", "certain", "harmful" if acts else "note",
                              "Gradients are changed while they still carry the loss scale" if acts else "Gradients are looked at while they still carry the loss scale", FIX,
                              Where.at(Location(file, e.line)),
                              evidence=(Evidence(f"`{window.line(file, e.line).strip()}` comes between the scaled backward pass and unscale_ or step", "source", None, None, 1),))
                break


def changes(module: ast.Module, e: scaling.Event) -> bool:
    """Whether the scaled figure changes gradients or decides about the step: in its own statement, or through the name that it is bound to."""
    here = {call_name(c) for c in calls(e.node)}
    if here & set(DECIDES) or isinstance(e.node, ast.If | ast.While | ast.AugAssign):
        return True
    if isinstance(e.node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == "grad" for t in e.node.targets):
        return True
    if isinstance(e.node, ast.For):  # the body holds statements of its own
        return any(call_name(c) in DECIDES for c in calls(e.node))
    names = {n.id for t in getattr(e.node, "targets", ()) for n in ast.walk(t) if isinstance(n, ast.Name)}
    for _ in range(3):
        names |= {n.id for s in ast.walk(module) if isinstance(s, ast.Assign) and names & words(s.value) for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    for s in ast.walk(module):
        if isinstance(s, ast.If | ast.While) and names & words(s.test) and not any(call_name(c) == "print" for c in calls(s)):
            return True
        if isinstance(s, ast.Call) and call_name(s) in DECIDES and names & {w for a in s.args for w in words(a)}:
            return True
    return False


def other_optimizer(window: Window) -> Iterator[Finding]:
    """Parameters of one optimizer are clipped after another one's gradients were unscaled."""
    for file, module, found in scaling.scopes(window):
        holders: dict[str, set[str]] = {}
        for s in ast.walk(module):
            if isinstance(s, ast.Assign) and isinstance(s.value, ast.Call) and s.value.args and any(call_name(c) == "parameters" for c in calls(s.value)):
                for t in s.targets:
                    pairs = zip(t.elts, s.value.args, strict=False) if isinstance(t, ast.Tuple) else [(t, s.value.args[0])]
                    for name, given in pairs:
                        holders.setdefault(ast.unparse(name), set()).update(words(given) - {"parameters"})
        unscaled: set[str] = set()
        for e in found:
            if e.kind == "unscale" and isinstance(e.node, ast.Call) and e.node.args:
                unscaled.add(ast.unparse(e.node.args[0]))
            elif e.kind in ("scaler-step", "update", "scale"):
                unscaled.clear()
            elif e.kind == "clip" and unscaled and unscaled <= set(holders) and isinstance(e.node, ast.Call) and e.node.args:
                clipped_name = root(e.node.args[0])
                owners = {name for name, what in holders.items() if clipped_name and clipped_name.split(".")[-1] in what}
                if owners and not owners & unscaled:
                    yield Finding("amp-unscale-missing", "certain", "harmful", f"Parameters of {sorted(owners)[0]} are clipped, but only {', '.join(sorted(unscaled))} was unscaled",
                                  f"Call scaler.unscale_({sorted(owners)[0]}) before this line.", Where.at(Location(file, e.line)),
                                  evidence=(Evidence(f"`{window.line(file, e.line).strip()}` follows unscale_({', '.join(sorted(unscaled))})", "source", None, None, 1),),
                                  treatment="unscale-before-clip")


def penalty(window: Window) -> Iterator[Finding]:
    """Gradients that `autograd.grad` takes of a scaled loss go into a norm without being divided."""
    for f in scaling.active(window)[:1]:
        if not f.get("scales"):
            return
        for file, module, _ in scaling.scopes(window):
            for s in ast.walk(module):
                if not isinstance(s, ast.Assign) or not any(call_name(c) == "grad" and any(call_name(i) == "scale" for i in calls(c)) for c in calls(s.value)):
                    continue
                names = {n.id for t in s.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                divided = any(isinstance(n, ast.BinOp | ast.AugAssign | ast.Call | ast.ListComp | ast.GeneratorExp) and names & words(n)
                              and any(re.search(r"inv|get_scale|unscale|scale$", w) for w in words(n)) and n is not s.value and not _inside(n, s.value)
                              for n in ast.walk(module))
                if names and not divided and scaling.ran(window, file, s.lineno, s.end_lineno):
                    yield Finding("amp-unscale-missing", "certain", "harmful", "A penalty is made of gradients that still carry the loss scale",
                                  "Multiply the gradients by 1 / scaler.get_scale() before taking their norm.", Where.at(Location(file, s.lineno)),
                                  evidence=(Evidence(f"`{window.line(file, s.lineno).strip()}`; {', '.join(sorted(names))} is never divided by the scale", "source", None, None, 1),))


def _inside(node: ast.AST, outer: ast.AST) -> bool:
    return any(n is node for n in ast.walk(outer))


def applied(window: Window) -> Iterator[Finding]:
    """Losses are scaled, optimizers step, and nothing ever unscales."""
    for f in scaling.active(window):
        if (f.get("scales") or 0) >= 2 and not f.get("steps") and not f.get("unscales") and window.n_steps >= 2:
            hand = [e for _, _, found in scaling.scopes(window) for e in found if e.kind == "unscale"]
            line = next((Location(file, e.line) for file, _, found in scaling.scopes(window) for e in found if e.kind == "step"), None)
            if not hand:
                yield Finding("amp-unscale-missing", "certain", "fatal", f"The optimizer steps on gradients that carry the loss scale of {f.get('init_scale'):g}",
                              "Step with scaler.step(optimizer) and scaler.update() instead of optimizer.step().",
                              Where.at(line or place((f.get("lines") or {}).get("scales")) or f.at),
                              evidence=(Evidence(f"{f.get('scales')} losses scaled, {window.n_steps} optimizer steps, no unscale_ and no scaler.step", "scaler", 0.0, None,
                                                 int(f.get("scales") or 1)),), )


def by_hand(window: Window, least_scale: float) -> Iterator[Finding]:
    """A scale written by hand: gradients used, clipped or applied before they are divided."""
    for h in scaling.hand_scales(window):
        if h.value is None or h.value < least_scale or (h.value != h.value):
            continue
        early = next(pending(h.events, hand=True), None)
        if early is not None and scaling.ran(window, h.file, early.line, getattr(early.node, "end_lineno", early.line)):
            yield Finding("amp-unscale-missing", "certain", "harmful", f"Gradients are clipped or used while they still carry the factor {h.name} = {h.value:g}",
                          f"Divide the gradients by {h.name} first.", Where.at(Location(h.file, early.line)),
                          evidence=(Evidence(f"`{window.line(h.file, early.line).strip()}` follows a backward pass of the loss times {h.name}", "source", h.value, least_scale, 1),))
        elif not any(e.kind == "unscale" for e in h.events) and window.n_steps:
            yield Finding("amp-unscale-missing", "certain", "harmful", f"The loss is multiplied by {h.name} = {h.value:g} and the gradients are never divided by it",
                          f"Divide every gradient by {h.name} between backward and step.", Where.at(Location(h.file, h.line)),
                          evidence=(Evidence(f"`{window.line(h.file, h.line).strip()}`; no gradient is divided by {h.name} before the step", "source", h.value, least_scale, 1),))
