from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.curve import optimizer, parameters


@rule("gradient-collapse", "signal")
def check(window: Window, *, left: float = 1e-3, running: int = 5, beside: float = 0.03, history: int = 5) -> Iterator[Finding]:
    """The gradient of one layer fell to nothing while the others kept theirs.

    **What it is.** A symptom: a layer that did learn gets no gradient any more.

    **How it is seen.** The gradient norm of a parameter is below `left` of its own earlier median (`history` samples or more) in the last `running` samples,
    while the median fall of all parameters is not below `beside`. The handbook's limit (1e-5 for five steps) is absolute; this one is relative
    to the layer's own history.

    **Why it matters.** The layer is frozen from here on, whatever the learning rate.

    **What to do.** First look for units that are always zero or saturated behind the layer; then for a branch that is no longer used.

    **When this is wrong.** Layers that are frozen on purpose later on, experts and branches that are switched off: hence only a note.

    **Source.** Handbook B §18.
    """
    rows = window.layers
    rows = rows[np.isfinite(rows["grad_norm"])]
    falls: dict[int, float] = {}
    for uid in np.unique(rows["param"]):
        norm = rows["grad_norm"][rows["param"] == uid].astype(float)
        if len(norm) >= running + history and np.median(norm[:-running]) > 0:
            falls[int(uid)] = float(norm[-running:].max() / np.median(norm[:-running]))
    if len(falls) < 3 or float(np.median(list(falls.values()))) < beside:
        return
    gone = sorted((f, uid) for uid, f in falls.items() if f < left)
    if not gone or len(gone) > len(falls) // 2:
        return
    known, made = parameters(window), optimizer(window)
    names = [str(known.get(uid, {}).get("name", uid)) for _, uid in gone]
    yield Finding("gradient-collapse", "measured", "note", f"The gradient of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} fell to {gone[0][0]:.1g} of what it was",
                  "Look for units that are always zero or saturated behind this layer, then for a branch that is no longer used.",
                  Where.at(made.at if made is not None else None, parameter=names[0]), last_step=int(rows["step"][-1]),
                  evidence=(Evidence(f"largest of the last {running} samples against the earlier median; the median parameter kept {float(np.median(list(falls.values()))):.2g}", "layers/grad_norm",
                                     gone[0][0], left, len(falls)),))
