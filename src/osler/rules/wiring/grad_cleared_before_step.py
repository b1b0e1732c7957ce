from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import dotted, nodes, quoted, spot


@rule("grad-cleared-before-step", "wiring")
def check(window: Window, *, share: float = 0.7, least: int = 3) -> Iterator[Finding]:
    """zero_grad stands between backward and step, so the step finds nothing.

    What it is: the gradients that backward has just written are cleared before the optimizer reads them.
    How it is seen: between the last backward and the step, the gradient of a parameter that the loss reaches became None or all zero; in
    at least `share` of at least `least` steps.
    Why it matters: no parameter moves (or only weight decay and old momentum move it).
    What to do: order the three calls zero_grad, backward, step.
    When this is wrong: gradients that are taken aside, cleared and put back before the step are there again when the step looks, and
    are not reported.
    Source: torch.optim documentation, "Taking an optimization step".
    """
    counts = window.last("cycle")
    for row in (counts.get("optimizers") or ()) if counts is not None else ():
        steps, cleared = int(row.get("steps") or 0), int(row.get("cleared_before") or 0)
        judged = int(row.get("judged") or steps)
        if cleared < least or cleared < share * min(judged, steps):
            continue
        lines = row.get("last_lines") or {}
        step, backward = spot(lines.get("step")), spot(lines.get("backward"))
        place = between(window, backward, step) or step
        yield Finding(
            "grad-cleared-before-step", "certain", "fatal", "gradients are cleared after the backward and before the step",
            f"Move {quoted(window, place, 'zero_grad')} before the backward: zero_grad, backward, step.",
            Where.at(place, also=tuple(str(p) for p in (backward, step) if p is not None and p != place)), first_step=1, last_step=window.n_steps,
            evidence=(Evidence(f"{cleared} of {min(judged, steps)} steps looked at found the gradients of the last backward cleared", "cycle/cleared_before",
                               value=float(cleared), threshold=share * min(judged, steps), samples=min(judged, steps)),),
            treatment="zero-grad", explains=("loss-plateau", "lr-too-low", "vanishing-gradients", "step-missing-or-rare"))
        return


def between(window: Window, backward: Location | None, step: Location | None) -> Location | None:
    """The clearing line nearest before the step and after the backward, else any that is nearest to the step."""
    def clears(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return dotted(node.func).split(".")[-1] == "zero_grad"
        return isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == "grad" for t in node.targets)

    found = [at for at, _ in nodes(window, clears) if step is not None and at.file == step.file]
    if not found or step is None:
        return None
    inside = [at for at in found if backward is not None and backward.file == step.file and backward.line < at.line < step.line]
    return inside[-1] if inside else min(found, key=lambda at: abs(at.line - step.line))
