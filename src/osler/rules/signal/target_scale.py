from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.curve import in_turn, loaded
from osler.rules.outcome import Outcome, outcome
from osler.rules.preparation import target_line
from osler.rules.scales import REGRESSION, Pair, Score, pairs, reach, score


@rule("target-scale", "signal")
def check(window: Window, *, large: float = 25.0, small: float = 0.01, unlearned: float = 0.9, slow: float = 0.5, worse: float = 1.3) -> Iterator[Finding]:
    """The targets of a regression are far from unit scale.

    **What it is.** Prices in thousands or concentrations in millionths are regressed on as they are, by a network whose outputs and steps are of
    unit size.

    **How it is seen.** Root mean square of the targets above `large` or below `small`, and the run has not coped: the late loss is above `unlearned`
    times that of a constant prediction (the mean of the targets) while the predictions lie off that mean, or above `worse` times, or the targets are above ten times
    `large`; or the loss was lost to infinity. Above `slow` times it is a note.

    **Why it matters.** With large targets the loss is huge and so are its gradients: plain gradient descent explodes, while clipped or adaptive steps need
    as many steps as the target is large. With tiny ones the noise of the untrained output is larger than everything there is to learn.

    **What to do.** Standardise the targets with figures of the training rows, or take their logarithm, and transform predictions back.

    **When this is wrong.** Targets in hundreds that are learned well within the run are not reported, nor are outputs that an activation bounds
    (see output-range).

    **Source.** Handbook A §3 (log-space MSE for heavy-tailed targets); LeCun et al., "Efficient BackProp" (1998).
    """
    if window.n_steps < 2 or loaded(window):
        return
    for pair in pairs(window):
        if pair.function not in (*REGRESSION, "difference") or small <= pair.size <= large or pair.size == 0:
            continue
        op = pair.maker()
        bounds = reach(op) if op is not None else None
        if bounds is not None and pair.outside(*bounds) > 0.1:
            continue
        found, end = score(window, pair), outcome(window)
        away = pair.late is not None and abs(pair.late["mean"] - pair.target["mean"]) > 0.5 * pair.target["std"]
        failed = end.lost or (found is not None and found.ratio > unlearned and (away or found.ratio > worse or pair.size < small or pair.size > 10 * large))
        if in_turn(window) or not (failed or (found is not None and found.ratio > slow)):
            continue
        yield say(window, pair, found, end, failed, large, small, unlearned)
        return


def say(window: Window, pair: Pair, found: Score | None, end: Outcome, failed: bool, large: float, small: float, unlearned: float) -> Finding:
    at = target_line(window, pair.at) or pair.at
    big = pair.size > large
    end_text = f"the loss ends at {found.ratio:.3g} times that of a constant prediction" if found is not None and not end.lost else end.told()
    late = f"; predictions have mean {pair.late['mean']:.3g} and deviation {pair.late['std']:.2g} at the end" if pair.late is not None else ""
    return Finding(
        "target-scale", "measured", "harmful" if failed else "note", f"Targets are far from unit scale: mean {pair.target['mean']:.4g}, deviation {pair.target['std']:.3g}",
        f"Standardise the targets made at {quoted(window, at, 'this line')} (or take their logarithm) and transform predictions back.",
        Where.at(at, also=(str(pair.at),) if pair.at is not None and pair.at != at else ()), first_step=0, last_step=window.n_steps,
        evidence=(Evidence(f"targets have root mean square {pair.size:.3g}, first predictions {abs(pair.prediction['mean']) + pair.prediction['std']:.3g}", "criterion/target",
                           pair.size, large if big else small, pair.fact.get("sampled") if pair.fact is not None else 1),
                  Evidence(f"{end_text}{late}", "calls/value", found.ratio if found is not None else None, unlearned, found.calls if found is not None else None)),
        treatment="normalise-targets", explains=("loss-plateau", "loss-diverged", "lr-too-low") if failed else ())
