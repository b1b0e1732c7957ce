from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import matrices, modules, newest, parameters
from osler.rules.script import place


@rule("half-frozen", "signal")
def check(window: Window, *, share: float = 1e-3, still: float = 1e-4, min_samples: int = 4) -> Iterator[Finding]:
    """One layer hardly moves while the others learn.

    **What it is.** A weight matrix whose gradient is not zero, but so small beside that of the others that it stays what it was.

    **How it is seen.** Median update of a matrix relative to its norm, over the samples: below `share` of the median matrix, and the whole run adds up to less than
    `still` of the norm.

    **Why it matters.** The layer is random to the end: the model is smaller than it looks.

    **What to do.** Look at what scales its branch (a gate near 0, a residual factor, a tiny learning rate of its group), or normalise.

    **When this is wrong.** A group with a small learning rate on purpose (a pretrained trunk), hence a note.

    **Source.** Handbook B §3 (mean |g| of a layer below 1e-6). ⚠ The absolute limit depends on the loss and the size of the layer; the relative one does not.
    """
    rows = window.layers
    rows = rows[np.isfinite(rows["update_norm"]) & (rows["weight_norm"] > 0) & np.isin(rows["param"], matrices(window))]
    known, own = parameters(window), newest(window)
    if not len(rows) or not len(own):
        return
    steps = int(own["step"][-1] - own["step"][0] + 1)
    ratios: dict[int, tuple[float, int]] = {}
    for uid in np.unique(rows["param"]):
        here = rows[rows["param"] == uid]
        if len(here) >= min_samples and not known.get(int(uid), {}).get("loaded"):
            ratios[int(uid)] = (float(np.median(here["update_norm"] / here["weight_norm"])), len(here))
    if len(ratios) < 3:
        return
    middle = float(np.median([r for r, _ in ratios.values()]))
    slow = [(r, uid, n) for uid, (r, n) in ratios.items() if 0 < r < share * middle and r * steps < still]
    if slow:
        ratio, uid, n = min(slow)
        p = known[uid]
        yield Finding(
            "half-frozen", "measured", "note", f"{p.get('name')} hardly moves: {ratio / middle:.1e} of the update of a typical layer",
            "Look at what scales this branch (gate, residual factor, learning rate of its group).",
            Where.at(place(modules(window).get(p.get("module", -1), {}).get("at")), parameter=str(p.get("name"))), first_step=int(rows["step"][0]), last_step=int(rows["step"][-1]),
            evidence=(Evidence(f"a step changes it by {ratio:.1e} of its norm, a typical matrix by {middle:.1e}; {steps} steps add up to {ratio * steps:.1e}", "layers/update_norm",
                               ratio, share * middle, n),))
