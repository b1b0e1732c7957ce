"""The verdict in a terminal: the line to change first, then why."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console
from rich.text import Text

from osler.core.finding import Finding


def render(model: dict[str, Any], stream: IO[str], color: str = "auto", width: int | None = None) -> None:
    console = Console(file=stream, width=width, no_color=color == "never", force_terminal=True if color == "always" else None, highlight=False)
    console.print(Text(model["verdict"]["text"]))
    for f in model["findings"]:
        if f["explained_by"] is None:
            console.print(Text(f"{f['place'] or ''} {f['fix']}"))
            console.print(Text(f"  {f['cause']} ({f['severity']}, {f['certainty']}): {f['title']}"))


def one_line(finding: Finding, directory: str | None = None) -> str:
    where = finding.where
    place = f"{where.file}:{where.line}: " if where.file else ""
    return f"osler: {place}{finding.title} [{finding.cause}]"
