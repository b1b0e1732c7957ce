"""Findings the user does not want to see: ``ignore`` in the configuration, ``# osler: ignore[cause]`` in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from osler.core.finding import Finding, NotChecked
from osler.diagnose import catalogue
from osler.diagnose.config import Config

COMMENT = re.compile(r"#\s*osler:\s*ignore(?:\[([^\]]*)\])?", re.IGNORECASE)


class Suppressions:
    """Answers, for one window's sources, whether a finding is to be shown."""

    def __init__(self, config: Config, sources: Mapping[str, str]) -> None:
        self.config = config
        self.lines = {file: text.splitlines() for file, text in sources.items() if "osler:" in text}
        self.trees = {file: tree(sources[file]) for file in self.lines}

    def hides(self, finding: Finding) -> bool:
        if self.config.ignores(finding.cause):
            return True
        file, line = finding.where.file, finding.where.line
        if file is None or line is None or file not in self.lines:
            return False
        lines = self.lines[file]
        first, last = statement(self.trees[file], line)
        texts = lines[max(0, first - 1): last]
        return any(found is not None and covers(found, finding.cause) for found in map(COMMENT.search, texts))

    def split(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """Shown, hidden."""
        shown: list[Finding] = []
        hidden: list[Finding] = []
        for finding in findings:
            (hidden if self.hides(finding) else shown).append(finding)
        return shown, hidden

    def mistakes(self) -> list[NotChecked]:
        """Comments that name a cause which does not exist, and so ignore nothing."""
        rows = []
        for file, lines in self.lines.items():
            for number, text in enumerate(lines, 1):
                found = COMMENT.search(text)
                for cause in names(found) if found else ():
                    if cause not in catalogue.known():
                        hint = catalogue.nearest(cause, catalogue.known())
                        rows.append(NotChecked("ignore comment", f"{file}:{number} names {cause!r}, which is no cause.{hint}"))
        return rows


def names(found: re.Match[str]) -> list[str]:
    return [word.strip() for word in (found.group(1) or "").split(",") if word.strip()]


def covers(found: re.Match[str], cause: str) -> bool:
    """A comment without brackets covers everything on its line."""
    return found.group(1) is None or cause in names(found)


def tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def statement(module: ast.Module | None, line: int) -> tuple[int, int]:
    """First and last line of the statement that holds ``line``; of a compound one only its header."""
    first, last = line, line
    nodes: list[ast.stmt] = list(module.body) if module is not None else []
    while nodes:
        here = next((n for n in nodes if n.lineno <= line <= (n.end_lineno or n.lineno)), None)
        if here is None:
            break
        blocks = [getattr(here, name, None) or [] for name in ("body", "orelse", "finalbody", "handlers", "cases")]
        inner: list[ast.stmt] = []
        for block in blocks:
            for item in block:
                inner += item.body if isinstance(item, ast.ExceptHandler | ast.match_case) else [item]
        first, last = here.lineno, here.end_lineno or here.lineno
        if inner:
            last = max(first, min(n.lineno for n in inner) - 1)
            if line > last:
                first, last = line, line
        nodes = inner
    return first, last
