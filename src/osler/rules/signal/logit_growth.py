from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import modules
from osler.rules.graph_questions import criteria, criterion_op, origin
from osler.rules.script import place


@rule("logit-growth", "signal")
def check(window: Window, *, size: float = 30.0, growth: float = 10.0) -> Iterator[Finding]:
    """The scores grow without bound.

    **What it is.** The last layer's scores before a cross entropy become very large: the softmax is saturated, and in half precision it overflows.

    **How it is seen.** Deviation of the output of the layer that makes the scores, in the late samples: above `size`, and `growth` times that of the first sample.

    **Why it matters.** A saturated softmax gives gradients of 0 or 1 only; large language models diverge this way.

    **What to do.** Weight decay on the last layer, a smaller learning rate, label smoothing, or a penalty on the logarithm of the partition function (z-loss).

    **When this is wrong.** A small network that knows its data by heart has large scores as well, hence a note.

    **Source.** PaLM (2022), z-loss; Wortsman et al., "Small-scale proxies for large-scale Transformer training instabilities" (2023).
    """
    rows = window.stream("activations")
    for fact in criteria(window):
        call = criterion_op(window, fact) if fact.get("function") == "cross_entropy" else None
        made = origin(call[0], call[1].ins[0], call[1].index)[0] if call is not None else None
        here = rows[(rows["module"] == made.module) & np.isfinite(rows["std"])] if made is not None and made.module >= 0 else rows[:0]
        if len(here) < 4:
            continue
        first, late = float(here["std"][0]), float(np.median(here["std"][-max(2, len(here) // 4):]))
        if late > size and late > growth * first:
            module = modules(window).get(made.module if made is not None else -1, {})
            yield Finding(
                "logit-growth", "measured", "note", f"Scores before cross entropy grew from a deviation of {first:.2g} to {late:.3g}",
                "Weight decay on the last layer, a lower learning rate, label smoothing or a z-loss keep scores small.",
                Where.at(place(module.get("at")) or fact.at, module=str(module.get("name") or "")), first_step=int(here["step"][0]), last_step=int(here["step"][-1]),
                evidence=(Evidence(f"deviation of the scores {first:.3g} at step {int(here['step'][0])}, {late:.3g} late", "activations/std", late, size, len(here)),))
            return
