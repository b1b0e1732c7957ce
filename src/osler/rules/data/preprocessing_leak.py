from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.lineage import lineage
from osler.rules.lineage_values import Statistic
from osler.rules.splits import Site, sites

WHAT = {"statistic": "A statistic", "fit": "A transformer", "encoding": "An encoding", "selection": "The choice of columns", "vocabulary": "The vocabulary"}
ORDER = ("copies", "selection", "encoding", "fit", "statistic", "vocabulary")


@rule("preprocessing-leak", "data")
def check(window: Window) -> Iterator[Finding | NotChecked]:
    """A scaler, selection, encoding or imputation was fitted with the validation rows.

    **What it is.** Means, ranges, principal components, chosen columns, target encodings or additional minority rows are computed over the whole
    table, and the table is divided afterwards.

    **How it is seen.** The script is read in its order of execution, functions and classes included: something learned from all rows of a table
    goes into its features, and the same table is divided into parts later; or scikit-learn was seen to fit a transformer, in whatever file, and
    to divide the rows that came out of it (also inside cross-validation). With the labels in it (columns chosen by their relation to the
    target, means of the target per category, rows added for a class) it is harmful; without them it is a note.

    **Why it matters.** What was learned with the labels of the validation rows makes them easy: on columns of pure noise a selection over all rows
    shows an accuracy far above chance.

    **What to do.** Divide first; fit on the training rows and apply to both sides (a `Pipeline` does it inside cross-validation).

    **When this is wrong.** Statistics that are known beforehand; a table that is never judged on. Scaling without labels hardly moves the figure and is a note.

    **Source.** Handbook A §22; scikit-learn, "Common pitfalls: data leakage" (pull request 18426).
    """
    found = [row for file in window.sources for row in leaks(window, file)]

    def line_of(file: str, learned: Statistic, site: Site) -> int:
        walk = lineage(window.sources[file])
        return site.split.before(learned, walk.births.get(learned.table, ()) if walk is not None else ())

    loud = [row for row in found if row[1].labels]
    seen = None if loud else fitted(window)
    if seen is not None and (seen.severity != "note" or not found):
        yield seen
        return
    for file, learned, site in sorted(loud or found, key=lambda row: (ORDER.index(row[1].kind), -line_of(*row) if row[1].kind == "selection" else line_of(*row)))[:1]:
        line = line_of(file, learned, site)
        yield Finding(
            "preprocessing-leak", "certain", "harmful" if learned.labels else "note",
            f"Rows made from others of their class are added before the split at line {site.line}" if learned.kind == "copies"
            else f"{WHAT[learned.kind]} is learned from all rows{' and their labels' if learned.labels else ''} before the split at line {site.line}",
            "Divide the rows first; fit on the training rows and apply the result to both sides.",
            Where.at(Location(file, line), also=tuple(dict.fromkeys(f"{file}:{n}" for n in (learned.line, site.line) if n != line))),
            evidence=(Evidence(f"what line {learned.line} computes from the whole table is in the features that line {site.line} divides", "source", None, None, 1),))
    if not found and not any(lineage(text) is not None for text in window.sources.values()):
        yield NotChecked("preprocessing-leak", "the text of the script was not kept or could not be followed")


def leaks(window: Window, file: str) -> list[tuple[str, Statistic, Site]]:
    """What was learned from a whole table, is in its features, and precedes a division of that table."""
    here = [s for s in sites(window) if s.file == file]
    cut: dict[int, set[str]] = {}
    for site in here:
        for table in site.split.tables:
            cut.setdefault(table, set()).add(site.split.text if site.split.how not in ("random", "folds") else "random" + site.split.text)
    divided = {t for t, texts in cut.items() if len(texts) >= 2 or any(x.startswith("random") for x in texts)}
    found = []
    for site in here:
        for piece in site.split.pieces:
            if piece.label:
                continue
            for learned in piece.learned:
                aligned = learned.table in site.split.tables or learned.labels
                loud = learned.labels and (learned.kind != "copies" or site.drawn is not None)
                if learned.table in divided and aligned and (loud or not learned.labels) and (learned.kind != "copies" or learned.labels):
                    found.append((file, learned, site))
    walk = lineage(window.sources[file])
    for value in walk.applied if walk is not None and not found else ():
        for learned in value.learned if not value.label else ():
            site_of = next((s for s in here if learned.table in s.split.tables), None)
            if site_of is not None and learned.table in divided and (learned.table in value.part or learned.labels) and learned.kind != "copies":
                found.append((file, learned, site_of))
    return found


LABELS = ("LabelEncoder", "LabelBinarizer", "MultiLabelBinarizer")
SUPERVISED = ("sklearn.feature_selection.", "sklearn.preprocessing._target_encoder", "sklearn.discriminant_analysis", "sklearn.cross_decomposition")


def fitted(window: Window) -> Finding | None:
    """As scikit-learn was seen to work: rows that came out of a transformer fitted on all of them are divided."""
    fits = {int(f["number"]): f for f in window.facts("sklearn-fit")}
    best: Finding | None = None
    earlier: set[int] = set()
    for split in window.facts("sklearn-split"):
        behind: set[int] = set()
        queue = list(split.get("made_by") or ())
        while queue:
            number = queue.pop()
            if number in fits and number not in behind:
                behind.add(number)
                queue += fits[number].get("parents") or ()
        for number in sorted(behind):
            fit = fits[number]
            copies = fit.get("method") == "fit_resample"
            if fit.at is None or str(fit.get("class")) in LABELS or number > int(split["number"]) or (fit.get("rows") != split.get("rows") and not copies):
                continue
            labels = bool(fit.get("y")) and (copies or any(n.startswith(SUPERVISED) and not n.endswith("VarianceThreshold")
                                                           for n in (f"{fit.get('module')}.{fit.get('class')}", *(fit.get("steps") or ()))))
            loud = labels and int(fit["rows"]) not in earlier  # a part of a division is divided again: the other part stays unseen
            if best is not None and not (loud and best.severity == "note"):
                continue
            best = Finding(
                "preprocessing-leak", "certain", "harmful" if loud else "note",
                f"{fit.get('class')} is fitted on all {fit.get('rows')} rows{' and their labels' if labels else ''} before they are divided" + (f" at line {split.at.line}" if split.at is not None else ""),
                "Divide the rows first; fit on the training rows and apply the result to both sides.",
                Where.at(fit.at, also=(str(split.at),) if split.at is not None else ()),
                evidence=(Evidence(f"what {fit.get('class')} made of the {fit.get('rows')} rows it was fitted on is what {split.get('function')} divided", "sklearn-split",
                                   float(fit["rows"]), None, int(fit["rows"])),))
        earlier |= set(split.get("sizes") or ())
    return best
