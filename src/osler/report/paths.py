"""Paths as a reader wants them: relative to the run's working directory where they lie below it, with forward slashes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath, PurePosixPath
from typing import Any

from osler.core.finding import Finding


def working_directory(run: Mapping[str, Any]) -> str:
    for key in ("cwd", "working_directory", "directory"):
        if isinstance(run.get(key), str) and run[key]:
            return str(run[key])
    return os.getcwd()


def relative(file: str, directory: str) -> str:
    """``file`` below ``directory`` without it, anything else whole."""
    path = PurePath(file)
    if path.is_absolute():
        try:
            path = path.relative_to(directory)
        except ValueError:
            pass
    text = path.as_posix()
    return str(PurePosixPath(text)) if text else file


def absolute(file: str, directory: str) -> str:
    return os.path.normpath(os.path.join(directory, file))


def shorten(text: str, directory: str) -> str:
    """Prose with the working directory taken off every path in it."""
    root = directory.rstrip("/\\")
    return re.sub(re.escape(root) + r"[/\\]", "", text) if len(root) > 1 else text


def localise(finding: Finding, directory: str) -> Finding:
    """The finding with every path of it relative to ``directory``."""
    where = finding.where
    return finding.replace(
        title=shorten(finding.title, directory), fix=shorten(finding.fix, directory),
        evidence=tuple(replace(e, text=shorten(e.text, directory)) for e in finding.evidence),
        where=replace(where, file=relative(where.file, directory) if where.file else None,
                      also=tuple(relative(a, directory) for a in where.also)))
