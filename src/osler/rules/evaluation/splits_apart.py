from __future__ import annotations

from collections.abc import Iterator

from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window


@rule("splits-apart", "evaluation")
def check(window: Window, *, sigmas: float = 2.0, least: int = 60) -> Iterator[Finding]:
    """Training and validation rows lie far apart.

    **What it is.** A symptom, the first dimension of stagnation: the two sides are not drawn from the same data.

    **How it is seen.** The centroids of both sides in the first two principal components of the (standardised) training rows are more than
    `sigmas` standard deviations apart.

    **Why it matters.** Progress on the one side need not show on the other.

    **What to do.** First compare how both sides are prepared (scaling, channels, units), then how the rows were split.

    **When this is wrong.** Splits by time, place or entity are meant to differ: hence only a note.

    **Source.** Handbook B §12 (data).
    """
    for fact in reversed(window.facts("experiment")):
        if fact.get("name") != "label-dependence" or fact.get("apart") is None or int(fact.get("other_rows") or 0) < least:
            continue
        distance = float(fact["apart"])
        if distance > sigmas:
            at = next((f.at for f in window.facts("phase") if f.get("kind") == "validation"), None)
            yield Finding("splits-apart", "measured", "note", f"Training and validation rows lie {distance:.2g} deviations apart in their first two principal components",
                          "Compare how both sides are prepared, then how the rows were split.", Where.at(at),
                          evidence=(Evidence(f"distance of the centroids of {fact.get('rows')} training and {fact.get('other_rows')} validation rows", "experiment/label-dependence", distance,
                                             sigmas, int(fact.get("other_rows") or 0)),))
        return
