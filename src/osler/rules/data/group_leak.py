from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.lineage import lineage
from osler.rules.rows_compared import UNSEEN, number, part, tables
from osler.rules.splits import GROUP_NAME, Site, drawn_split, group_names, sites

FIX = "Split the entities, not their rows (GroupShuffleSplit, or draw from the unique ids), and make copies of a row only after the split."


@rule("group-leak", "data")
def check(window: Window, *, both: float = 0.5, groups: int = 6, alike: float = 0.9, purer: float = 0.25, twins: float = 0.5, per_class: int = 4) -> Iterator[Finding | NotChecked]:
    """Rows of one patient, speaker, document or original are on both sides of the split.

    **What it is.** Several rows come from one entity (visits of a patient, frames of a clip, augmented copies of an image) and the
    split draws rows, so the model is judged on entities it knows.

    **How it is seen.** Three ways, each with a split that chance draws by rows. A vector of the script's names entities (its name says
    so), the share `both` of the validation rows has its entity in training, and rows of one entity are alike (median distance below
    `alike` of that of random rows) or share their label more often than shuffled ids (by `purer`). Or the rows themselves form many tight
    clusters (a jump in the distances to the training rows, more clusters than `per_class` a class) that lie on both sides, share `twins` of the
    validation rows, and the script makes rows entity by entity. Or rows were made from other rows before the split.

    **Why it matters.** The validation figure says how well known entities are recognised; on new ones it is lower.

    **What to do.** Split by entity; augment after the split.

    **When this is wrong.** New rows of known entities are what the model will meet (recommenders, per-user calibration): an id that
    is a column of the input or the target itself is left alone. Clusters without a sign of entities in the script are a note.

    **Source.** Handbook A §22 (identity); scikit-learn, "Cross-validation iterators for grouped data". Thresholds from simulated tables.
    """
    site = drawn_split(window)
    found = copies(window)
    if found is not None:
        yield found
        return
    seen = tables(window)
    for fact in seen:
        named = [g for g in fact.get("groups") or () if entity(g, groups, both, alike, purer)]
        if named and site is not None:
            best = max(named, key=lambda g: number(g, "both"))
            yield Finding(
                "group-leak", "measured", "harmful", f"{number(best, 'both'):.0%} of the validation rows belong to a {best['name']} that is also trained on",
                FIX, Where.at(site.at), evidence=(Evidence(
                    f"{best['name']} names {best['groups']} entities of about {best['size']} rows; rows of one are {alikeness(best)}; line {site.at.line} draws rows",
                    "experiment/table", number(best, "both"), both, int(number(fact.data, "judged_rows"))),))
            return
    for fact in seen:
        pairs = part(fact, "twins")
        cells, classes = number(pairs, "cells"), number(pairs, "classes", 2)
        if number(pairs, "share") - number(part(fact, "overlap"), "share") < twins or cells < max(8.0, per_class * min(classes, 20)) or number(pairs, "columns") < 6 or number(part(fact, "shifted"), "share") > 0.2 \
                or number(part(fact, "overlap"), "share") > 0.5:
            continue
        made = entities_made(window, site)
        loud = site is not None and made is not None
        yield Finding(
            "group-leak", "measured" if loud else "suspected", "harmful" if loud else "note",
            f"{number(pairs, 'share'):.0%} of the validation rows lie in tight clusters with training rows", FIX,
            Where.at(site.at if site is not None else None),
            evidence=(Evidence(f"the nearest {int(number(pairs, 'size'))} training rows are {number(pairs, 'jump'):.1f} times nearer than the next; "
                               f"at least {int(cells)} such clusters" + (f"; {made}" if made else ""), "experiment/table", number(pairs, "share"), twins, int(number(pairs, "rows"))),))
        return
    if not seen:
        yield NotChecked("group-leak", UNSEEN)


def entity(g: dict[str, Any], groups: int, both: float, alike: float, purer: float) -> bool:
    """Whether a vector names entities that matter for the target or the inputs."""
    if g.get("is_target") or g.get("is_column") or number(g, "groups") < groups or number(g, "both") < both or not GROUP_NAME.search(str(g.get("name")).split(".")[-1]):
        return False
    if number(g, "groups") <= number(g, "classes", 0.0):
        return False
    gain = number(g, "pure") - number(g, "pure_base") if isinstance(g.get("pure"), float) else 0.0
    return number(g, "alike", 1.0) < alike or gain > purer


def alikeness(g: dict[str, Any]) -> str:
    texts = [f"{1 / max(number(g, 'alike', 1.0), 1e-3):.1f} times as near as random ones"] if isinstance(g.get("alike"), float) else []
    if isinstance(g.get("pure"), float):
        texts.append(f"{number(g, 'pure'):.0%} of one label (shuffled ids: {number(g, 'pure_base'):.0%})")
    return " and ".join(texts) or "alike"


def entities_made(window: Window, site: Site | None) -> str | None:
    """A sign in the script that rows come entity by entity, and that the split does not ask for it."""
    names = sorted(n for n in group_names(window) if not re.match(r"^(n|num)_", n.split(".")[-1]))
    if names and site is not None:
        return f"the script speaks of {names[0]}, the split at line {site.line} does not"
    for file, text in window.sources.items():
        found = re.search(r"(repeat_interleave|np\.repeat|\.repeat\(|np\.tile|expand\()", text)
        if found is not None:
            return f"{file} repeats rows (line {text[:found.start()].count(chr(10)) + 1})"
        if re.search(r"for .+ in range\(.+\):\s*\n(.*\n){0,8}?\s+for .+ in range\(.+\):\s*\n(.*\n){0,6}?.*\.append\(", text):
            return "rows are appended in two nested loops"
        if re.search(r"\w+\[\s*:\s*,\s*None\s*(,\s*:\s*)?\]\s*\+|\[\w*(id|idx|of|owner|which)\w*\]\s*\+", text):
            return "rows are made by adding to a row of their entity"
    return None


def copies(window: Window) -> Finding | None:
    """Rows made from other rows, without labels, and then split."""
    for file, text in window.sources.items():
        walk = lineage(text)
        if walk is None:
            continue
        here = [s for s in sites(window) if s.file == file]
        for site in here:
            for piece in site.split.pieces:
                for learned in piece.learned:
                    if learned.kind == "copies" and not learned.labels and not piece.label and learned.table in site.split.tables and divides(here, site):
                        line = site.split.before(learned)
                        return Finding(
                            "group-leak", "certain", "harmful", "Rows made from other rows are split from them", FIX,
                            Where.at(Location(file, line), also=(f"{file}:{site.drawn or site.line}",)),
                            evidence=(Evidence(f"line {line} puts rows that are made from a table below its own rows; line {site.line} divides the result afterwards",
                                               "source", None, None, 1),))
    return None


def divides(here: list[Site], site: Site) -> bool:
    """A division by chance; one by position keeps copies that were put at the end apart only by accident and is left alone."""
    return site.drawn is not None
