from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import calls_at, dotted, quoted, spot
from osler.rules.graph_questions import optimizers


@rule("grad-not-cleared", "wiring")
def check(window: Window, *, share: float = 0.7, least: int = 3) -> Iterator[Finding]:
    """zero_grad is missing: every backward adds to the gradients of the steps before.

    What it is: nothing clears the gradients between one optimizer step and the next backward.
    How it is seen: before each backward looked at, the gradient of a parameter that the loss reaches is still the tensor the last step
    used, unchanged; in at least `share` of at least `least` steps.
    Why it matters: each step uses the sum of all gradients since the start. It acts like a momentum of 1: the loss swings, then diverges.
    What to do: call optimizer.zero_grad() once for each step, before the backward.
    When this is wrong: accumulation over several backwards clears once for each step and is not reported; setting `p.grad = None` by
    hand counts as clearing.
    Source: torch.optim documentation; torch issue 47175.
    """
    counts = window.last("cycle")
    known = optimizers(window)
    for row in (counts.get("optimizers") or ()) if counts is not None else ():
        steps, uncleared = int(row.get("steps") or 0), int(row.get("uncleared") or 0)
        judged = int(row.get("judged") or max(steps - 1, 0))
        if judged < least or uncleared < least or uncleared < share * judged or int(row.get("cleared_before") or 0) >= uncleared:
            continue
        lines = row.get("last_lines") or {}
        place = spot(lines.get("backward")) or spot(lines.get("step"))
        step = spot(lines.get("step"))
        stepped = [dotted(c.func) for c in calls_at(window, step) if dotted(c.func).endswith(".step")]
        name = stepped[0].removesuffix(".step") if stepped else "optimizer"
        maker = known.get(int(row.get("index", -1)))
        yield Finding(
            "grad-not-cleared", "certain", "harmful", "gradients are not cleared between steps: each backward adds to all those before",
            f"Call {name}.zero_grad() before {quoted(window, place, 'the backward')}.",
            Where.at(place, also=(str(step),) if step else ()), first_step=2, last_step=window.n_steps,
            evidence=(Evidence(f"{uncleared} of {judged} steps looked at added to the gradients that the step before had already used"
                               + (f" ({maker.get('class')})" if maker else ""), "cycle/uncleared", value=float(uncleared), threshold=share * judged, samples=judged),),
            treatment="zero-grad", explains=("loss-diverged", "exploding-gradients", "lr-too-high", "loss-spikes"))
        return
