from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import dotted, enclosing, nodes, quoted, spot
from osler.rules.graph_questions import hand_written, optimizers, reached

LOOPS = (ast.For, ast.While)
BY_HAND = re.compile(r"\.data\s*[-+*]?=|\.(sub_|add_|copy_|addcdiv_)\(.*grad|-=.*\bgrad\b|-=.*lr|\.data\.(sub_|add_|copy_)")


@rule("step-missing-or-rare", "wiring")
def check(window: Window, *, patience: int = 100, ratio: float = 4.0) -> Iterator[Finding]:
    """optimizer.step is not called, or far less often than gradients are made and thrown away.

    What it is: the step is missing, written without parentheses, called on another optimizer, or stands outside the loop whose
    gradients it should use; or the backward is missing, so that steps find nothing.
    How it is seen: backward passes and completed steps are counted, for each optimizer and together; where both loops are known from
    the source, a zero_grad inside the loop and a step outside of it discard all but the last gradient.
    Why it matters: without a step nothing is learned; a step for each epoch instead of each batch learns that much slower.
    What to do: call optimizer.step() after each backward (or after each group of accumulated ones).
    When this is wrong: parameters updated by hand, optimizers of a later stage, and accumulation (cleared once for each step) are not
    reported; a run is judged when it has ended or after `patience` backwards.
    Source: torch.optim documentation.
    """
    counts = window.last("cycle")
    backwards = max([int(counts.get("backwards") or 0) if counts else 0, *(int(f.get("backwards") or 0) for f in window.facts("exit")), len(window.facts("backward"))])
    known = optimizers(window)
    if not known or not (window.final or backwards >= patience):
        return
    steps = window.n_steps
    rows = list(counts.get("optimizers") or ()) if counts is not None else []
    if steps == 0 and backwards > 0:
        if not updated_by_hand(window) and not window.facts("exception"):
            yield never(window, backwards)
    elif steps >= 3 and backwards == 0:
        yield no_backward(window, steps, rows)
    elif steps > 0:
        yield from idle(window, rows)
        backwards = max(backwards, round(early_rate(window) * steps))
        if backwards >= ratio * steps and backwards >= 20:
            yield from discarded(window, backwards, steps, rows)


def early_rate(window: Window, most: int = 32) -> float:
    """Backward passes for each step while every one was counted; between watched cycles of a fast loop only steps are."""
    early = [(sum(int(o.get("steps") or 0) for o in f.get("optimizers") or ()), int(f.get("backwards") or 0)) for f in window.facts("cycle")]
    rates = [backwards / steps for steps, backwards in early if 4 <= steps <= most]
    return rates[0] if rates else 0.0


def updated_by_hand(window: Window) -> bool:
    return bool(hand_written(window) & reached(window)) or any(BY_HAND.search(line) for text in window.sources.values() for line in text.splitlines())


def bare_step(window: Window) -> Location | None:
    """`optimizer.step` written as an expression, without the call."""
    found = nodes(window, lambda n: isinstance(n, ast.Expr) and isinstance(n.value, ast.Attribute) and n.value.attr == "step")
    return found[0][0] if found else None


def never(window: Window, backwards: int) -> Finding:
    bare = bare_step(window)
    backward = next((f.at for f in window.facts("backward") if f.at is not None), None)
    place = bare or backward
    what = "is written without parentheses, so it is never called" if bare else "is never called"
    cure = f"Write {quoted(window, place, 'optimizer.step')[:-1]}()` with parentheses." if bare else f"Call optimizer.step() after {quoted(window, backward, 'the backward')}."
    return Finding("step-missing-or-rare", "certain", "fatal", f"optimizer.step {what}: no parameter ever moves", cure, Where.at(place), first_step=0,
                   evidence=(Evidence(f"{backwards} backward passes, 0 optimizer steps", "cycle/steps", value=0.0, threshold=1.0, samples=backwards),),
                   treatment="step-every-batch", explains=("loss-plateau", "lr-too-low", "grad-not-cleared"))


def no_backward(window: Window, steps: int, rows: list[dict[str, object]]) -> Finding:
    step = next((p for r in rows if (p := spot((r.get("last_lines") or {}).get("step"))) is not None), None)  # type: ignore[attr-defined]
    bare = nodes(window, lambda n: isinstance(n, ast.Expr) and isinstance(n.value, ast.Attribute) and n.value.attr == "backward")
    place = bare[0][0] if bare else step
    return Finding("step-missing-or-rare", "certain", "fatal", "backward is never called: every step finds no gradient",
                   f"Call loss.backward() before {quoted(window, step, 'the step')}.", Where.at(place), first_step=1, last_step=steps,
                   evidence=(Evidence(f"{steps} optimizer steps, 0 backward passes", "cycle/backwards", value=0.0, threshold=1.0, samples=steps),),
                   explains=("loss-plateau", "lr-too-low"))


def idle(window: Window, rows: list[dict[str, object]]) -> Iterator[Finding]:
    """One of several optimizers never steps although its parameters get gradients and no other optimizer holds them."""
    known = optimizers(window)
    working = {u for r in rows if r.get("steps") for u in (known[int(r["index"])].get("uids") or () if int(r["index"]) in known else ())}  # type: ignore[call-overload]
    served = reached(window)
    for index, fact in known.items():
        row = next((r for r in rows if r.get("index") == index), None)
        uids = set(fact.get("uids") or ())
        if row is None or row.get("steps") or not uids & served or uids & working or not window.final or uids & hand_written(window):
            continue
        yield Finding("step-missing-or-rare", "certain", "harmful", f"the optimizer made at {fact.at} never steps although its parameters get gradients",
                      f"Call step() on the optimizer of {quoted(window, fact.at, 'this line')} in the loop.", Where.at(fact.at), first_step=0,
                      evidence=(Evidence(f"{len(uids & served)} of its {len(uids)} parameters get gradients; it made 0 steps in {window.n_steps} steps of others", "cycle/steps",
                                         value=0.0, threshold=1.0, samples=window.n_steps),), treatment="step-every-batch")
        return


def discarded(window: Window, backwards: int, steps: int, rows: list[dict[str, object]]) -> Iterator[Finding]:
    """zero_grad runs with every backward, the step does not."""
    def named(last: str) -> list[Location]:
        return [at for at, n in nodes(window, lambda n: isinstance(n, ast.Call) and dotted(n.func).split(".")[-1] == last)]

    for row in rows:
        lines = row.get("last_lines") or {}
        step, backward = spot(lines.get("step")), spot(lines.get("backward"))  # type: ignore[attr-defined]
        if step is None or backward is None:
            continue
        loop = next(enclosing(window, backward, LOOPS), None)
        clears = [at for at in named("zero_grad") if at.file == backward.file and next(enclosing(window, at, LOOPS), None) is loop]
        outside = loop is not None and next(enclosing(window, step, LOOPS), None) is not loop
        conditional = any(isinstance(n, ast.If) for n in enclosing(window, step, (ast.If, *LOOPS)) if n is not loop and getattr(n, "lineno", 0) > getattr(loop, "lineno", 0))
        free = [at for at in clears if not any(getattr(n, "lineno", 0) > getattr(loop, "lineno", 0) for n in enclosing(window, at, (ast.If,)))]
        if free and (outside or conditional):
            place = step if outside else free[0]  # every so many batches: accumulation is meant
            yield Finding("step-missing-or-rare", "certain", "harmful", f"one step for {backwards / steps:.0f} backward passes, and the gradients between are cleared unused",
                          f"Move {quoted(window, step, 'the step')} into the loop of {quoted(window, backward, 'the backward')}, or clear the gradients only after a step."
                          if outside else f"Clear the gradients only after a step: move {quoted(window, place, 'zero_grad')} under the condition of {quoted(window, step, 'the step')}.",
                          Where.at(place, also=(str(backward), str(free[0] if place is step else step))), first_step=0, last_step=steps,
                          evidence=(Evidence(f"{backwards} backward passes, {steps} steps; {quoted(window, free[0], 'zero_grad')} runs with every backward", "cycle/steps",
                                             value=float(steps), threshold=float(backwards), samples=backwards),),
                          treatment="step-every-batch", explains=("lr-too-low", "loss-plateau"))
            return
