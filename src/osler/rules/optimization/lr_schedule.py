from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import LOUD, Finding, NotChecked
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.plateau import metric_checks
from osler.rules.schedule_calls import (
    consumed,
    doubled,
    fighting,
    foreign_optimizer,
    never_stepped,
    rebuilt,
    twice,
    wrong_argument,
)
from osler.rules.schedule_lengths import overrun, remarks, wrong_rate
from osler.rules.schedule_rates import absolute, first_stage, gone, growing, jitter, unfinished, without_effect
from osler.rules.schedules import rhythm, schedules


@rule("lr-schedule", "optimization")
def check(window: Window, *, tiny: float = 1e-3, share: float = 0.25, min_steps: int = 40) -> Iterator[Finding | NotChecked]:
    """The learning-rate schedule does not do what was planned.

    **What it is.** A scheduler that is stepped at the wrong rate (per batch what is counted in epochs, or the reverse), built with
    the wrong length, attached to another optimizer, never stepped, fed with the wrong metric, rebuilt, or set against a second
    one; or a schedule written by hand with such a mistake.

    **How it is seen.** First as facts of the program: how often each scheduler's `step` was called against optimizer steps and
    epochs, the length it was given and the names it is written in, the values handed to ReduceLROnPlateau and what computes
    them, which optimizer's groups it sets. Then by the rates that were used: at most `tiny` of the peak for the last `share` of
    the run (or zero for the first), a warm-up that still rises at the end below half of the base rate, a factor that is a rate,
    growth that loses the loss.

    **Why it matters.** Training freezes early, never leaves its warm-up, or is shaken again and again, while the loss looks like a
    hard problem.

    **What to do.** Write the length and call `step()` in the same unit; print the rate of every epoch once.

    **When this is wrong.** Planned cycles and restarts, a rate that ends near zero, runs stopped early and resumed ones are left
    alone; a rate gone when everything was learned already is a note. Schedules of optimizers that take turns are judged by their
    calls only.

    **Source.** PyTorch documentation of torch.optim.lr_scheduler; handbook A §10, whose jitter test (⚠ standard deviation above 20 %
    of the mean) fires on every healthy fall: here the scatter about a
    running median is compared with later steps, for a note that a warm-up is missing. Its length follows handbook A §31.
    """
    every = schedules(window)
    pace = rhythm(window)
    found: list[Finding] = list(overrun(window, every, pace))
    for s in every:
        for test in (foreign_optimizer(window, s), wrong_argument(window, s), metric_checks(window, s, pace), wrong_rate(window, s, pace), twice(window, s, pace), consumed(window, s),
                     never_stepped(window, s, pace)):
            said = list(test)
            found += said
            if any(f.severity in LOUD for f in said):
                break
    found += [*rebuilt(window, every), *fighting(window, every), *doubled(window, every)]
    if not any(f.severity in LOUD for f in found):
        for more in (gone(window, every, pace, tiny=tiny, share=share, least=min_steps), unfinished(window, every, pace), (f for s in every for f in first_stage(window, s)), absolute(window, every),
                     growing(window, every), without_effect(window)):
            found += list(more)
            if any(f.severity in LOUD for f in found):
                break
    if not found:
        found = [f for s in every for f in remarks(window, s, pace)][:2] or list(jitter(window))
    yield from found
    if not found and not len(window.steps):
        yield NotChecked("lr-schedule", "no optimizer step was seen")
