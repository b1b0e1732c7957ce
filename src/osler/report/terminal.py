"""The verdict in a terminal: the line to change first, then why. Plain text when the stream is no terminal."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from osler.core.finding import LOUD, Finding
from osler.report import paths, words

STYLES = {"fatal": "bold red", "harmful": "bold red", "wasteful": "yellow", "note": "blue"}
WIDEST = 104
REASONS = 5
"""Lines on what was not checked; the report has them all."""
TRAILING = re.compile(r"(?:\x1b\[[0-9;]*m|[ \t])+$", re.MULTILINE)
ASCII = str.maketrans({"–": "-", "…": "...", "→": "->", "·": "-", "×": "x", "’": "'", "“": '"', "”": '"', "≤": "<=", "≥": ">="})


@dataclass(frozen=True, slots=True)
class Glyphs:
    mark: str
    bar: str
    dot: str
    rule: str
    under: str


RICH = Glyphs("❯", "│", "·", "─", "└")
PLAIN = Glyphs(">", "|", "-", "-", "`-")


def render(model: dict[str, Any], stream: IO[str], color: str = "auto", width: int | None = None, link: str | None = None) -> None:
    """Writes the whole verdict to ``stream``.

    Args:
        model: from ``osler.report.model.build``.
        color: ``auto`` (a terminal that can, and no ``NO_COLOR``), ``always`` or ``never``.
        width: columns; default what the terminal has.
        link: path of the full report, named at the end.
    """
    console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False, soft_wrap=False,
                      no_color=True if color == "never" else None, force_terminal={"always": True, "never": False}.get(color),
                      color_system="standard" if color == "always" else None if color == "never" else "auto",
                      legacy_windows=False)
    glyphs = RICH if "utf" in (console.encoding or "").lower() else PLAIN
    screen = Screen(glyphs, min(console.width, WIDEST), color=console.color_system is not None)
    with console.capture() as capture:
        for part in screen.parts(model, link):
            console.print(part, width=screen.width)
    text = TRAILING.sub(lambda m: m.group().replace(" ", ""), capture.get())
    if glyphs is PLAIN:
        coding = console.encoding or "ascii"
        text = text.translate(ASCII).encode(coding, "replace").decode(coding)
    stream.write(text)
    stream.flush()


def one_line(finding: Finding, directory: str | None = None) -> str:
    """A finding as one line, for a run that is still going: place, claim, fix, cause."""
    finding = paths.localise(finding, directory or os.getcwd())
    where = finding.where
    place = f"{where.file}:{where.line}" if where.file and where.line else where.file or where.module or ""
    text = " ".join(part for part in (f"{place}:" if place else "", f"{words.sentence(finding.title)}", words.sentence(finding.fix)) if part)
    return f"osler: {' '.join(text.split())} [{finding.cause}]"


class Screen:
    """Lays the model out for one width."""

    def __init__(self, glyphs: Glyphs, width: int, color: bool) -> None:
        self.glyphs = glyphs
        self.width = width
        self.color = color

    def parts(self, model: dict[str, Any], link: str | None) -> list[RenderableType]:
        findings = model["findings"]
        own = [f for f in findings if f["explained_by"] is None]
        loud = [f for f in own if f["severity"] in LOUD]
        quiet = [f for f in own if f["severity"] not in LOUD]
        rows: list[RenderableType] = [self.head(model), Text("")]
        for finding in loud:
            rows += [self.finding(finding, findings), Text("")]
        rows += [self.remark(f) for f in quiet]
        if quiet:
            rows.append(Text(""))
        return [*rows, *self.foot(model, link)]

    def head(self, model: dict[str, Any]) -> Text:
        """A thin line that tells the script's output from ours, with the verdict in it."""
        style = {"fault": "bold red", "healthy": "bold green", "remarks": "bold green"}.get(model["verdict"]["state"], "bold")
        text = Text.assemble((f"{self.glyphs.rule * 2} osler ", "dim"), (model["verdict"]["text"], style), " ")
        text.append(self.glyphs.rule * max(0, self.width - text.cell_len), "dim")
        text.truncate(self.width)
        return text

    def finding(self, finding: dict[str, Any], others: list[dict[str, Any]]) -> RenderableType:
        style = STYLES[finding["severity"]]
        title = Text.assemble((f"{finding['place']}  " if finding["place"] else "", "bold cyan"))
        title.append_text(self.prose(words.heading(finding["fix"] or finding["meaning"]), "bold"))
        facts = [finding["cause"], finding["severity"], finding["certainty"], words.span(finding["when"]), *words.named(finding["where"])]
        line = Text(f" {self.glyphs.dot} ").join(Text(fact, style if fact == finding["severity"] else "dim") for fact in facts if fact)
        rows: list[RenderableType] = [self.prose(words.sentence(finding["title"])), line]
        if finding["code"]:
            rows += [Text(""), self.code(finding["code"])]
        proof = self.evidence(finding)
        if proof:
            rows += [Text(""), *proof]
        folded = [f for f in others if f["explained_by"] == finding["cause"]]
        if folded:
            rows.append(Text(""))
        for effect in folded:
            text = Text.assemble(("explains ", "dim"), (effect["cause"], "bold"), (": ", "dim"))
            text.append_text(self.prose(effect["title"], "dim"))
            rows.append(self.hanging(self.glyphs.under, text))
        return Group(title, Padding(Group(*rows), (0, 0, 0, 2)))

    def remark(self, finding: dict[str, Any]) -> RenderableType:
        """A finding that costs no result: what to change, and why, in two lines."""
        head = Text.assemble((f"{finding['severity']}  ", STYLES[finding["severity"]]), (f"{finding['place']}  " if finding["place"] else "", "cyan"))
        head.append_text(self.prose(words.heading(finding["fix"] or finding["meaning"])))
        why = Text(f"{finding['cause']}: ", "dim")
        why.append_text(self.prose(finding["title"], "dim"))
        return Group(head, Padding(why, (0, 0, 0, 2)))

    def code(self, code: dict[str, Any]) -> RenderableType:
        digits = len(str(code["lines"][-1]["n"]))
        room = max(16, self.width - digits - 8)
        rows = Text(no_wrap=True, overflow="ellipsis")
        for i, line in enumerate(code["lines"]):
            guilty = line["guilty"]
            rows.append(f"{self.glyphs.mark if guilty else ' '} {line['n']:>{digits}} ", "bold red" if guilty else "dim")
            rows.append(f"{self.glyphs.bar} ", "dim")
            text = line["text"] if len(line["text"]) <= room else line["text"][: room - 3] + "..."
            rows.append(text, "bold" if guilty else "dim")
            if i + 1 < len(code["lines"]):
                rows.append("\n")
        return rows

    def evidence(self, finding: dict[str, Any]) -> list[RenderableType]:
        rows: list[RenderableType] = [self.hanging(self.glyphs.dot, self.prose(e["text"])) for e in finding["evidence"]
                                      if e["text"] and e["text"] != finding["title"]]
        rows += [self.hanging(self.glyphs.dot, Text(f"also {also}")) for also in finding["where"]["also"]]
        told = words.confirmation(finding["confirmed"])
        if told:
            rows.append(self.hanging(self.glyphs.dot, Text(told, "green")))
        return rows

    def hanging(self, sign: str, text: Text) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(Text(sign, "dim"), text)
        return grid

    def prose(self, text: str, style: str = "") -> Text:
        """Text with its `code` set off: by colour where there is colour, else by the back-ticks it came with."""
        result = Text(style=style)
        for i, part in enumerate(re.split(r"`([^`\n]+)`", text)):
            code = i % 2 == 1
            result.append(part if not code or self.color else f"`{part}`", "cyan" if code else "")
        return result

    def foot(self, model: dict[str, Any], link: str | None) -> list[RenderableType]:
        counts, run = model["counts"], model["run"]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold", style="dim")
        name = run["script"] or run["command"]
        facts = [name, words.count(run["steps"], "step"), words.seconds(run["seconds"]) if run["seconds"] else "",
                 words.ending(run["end"])]
        grid.add_row("run", f" {self.glyphs.dot} ".join(f for f in facts if f))
        checked = words.count(counts["checked"], "cause")
        hidden = f", {counts['suppressed']} suppressed" if counts["suppressed"] else ""
        grid.add_row("checked", f"{checked}{hidden}")
        for i, row in enumerate(self.losses(model["series"])):
            grid.add_row("" if i else "loss", row)
        reasons = words.unchecked(model["not_checked"])
        for i, (why, rules) in enumerate(reasons[:REASONS]):
            some = ", ".join(rules[:4]) + (f" and {len(rules) - 4} more" if len(rules) > 4 else "")
            grid.add_row("" if i else "unchecked", f"{some}: {why}")
        if len(reasons) > REASONS:
            grid.add_row("", f"{sum(len(r) for _, r in reasons[REASONS:])} more, for {len(reasons) - REASONS} other reasons")
        if model["run"].get("guarded"):
            grid.add_row("guard", words.guarded(model["run"]["guarded"]))
        price = words.cost(model["overhead"])
        if price:
            grid.add_row("cost", price)
        if link:
            grid.add_row("report", link)
        return [grid]

    def losses(self, series: dict[str, Any]) -> list[Text]:
        rows = []
        for name, label in (("train_loss", "training"), ("validation_loss", "validation")):
            curve = series.get(name)
            if curve is None or curve["count"] < 2:
                continue
            text = Text(f"{words.figure(curve['first'])} ")
            if self.glyphs is RICH:
                text.append(words.spark(curve, max(8, min(32, self.width - 44))), "cyan")
            else:
                text.append("to")
            text.append(f" {words.figure(curve['last'])} {label}")
            if curve["nonfinite"]["count"]:
                text.append(f", {words.lost(curve['nonfinite'])}", "red")
            rows.append(text)
        return rows
