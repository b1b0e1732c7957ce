"""The options of ``osler run`` and how words become them; ``main`` and the verbs share the parser class."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from osler.core.errors import UsageError
from osler.core.finding import SEVERITIES

FORMATS = ("text", "json", "jsonl", "sarif")


class Parser(argparse.ArgumentParser):
    """One line and code 64 for a wrong call; no abbreviations, which would break when an option is added."""

    verbs: tuple[str, ...] = ()

    def __init__(self, prog: str | None = None, **more: Any) -> None:
        super().__init__(prog, **{**more, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        kind, _, words = message.partition(": ")
        if kind == "unrecognized arguments":
            first = words.split()[0].partition("=")[0]
            near = difflib.get_close_matches(first, self._option_string_actions, n=1, cutoff=0.7)
            message = f"{self.prog} has no option {first}." + (f" Did you mean {near[0]}?" if near else "")
        raise UsageError(f"{message.removesuffix('.')}{'' if message.endswith('?') else '.'} Try: {self.prog} --help")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked ``osler run`` for. ``fail_on`` and ``stop_on`` are severities."""

    directory: Path | None = None
    name: str | None = None
    budget: float = 0.02
    json: Path | None = None
    format: str | None = None
    output: Path | None = None
    fail_on: str | None = None
    stop_on: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    guard: bool = False
    locate: bool = False
    quiet: bool = False
    html: bool = True
    color: str = "auto"

    @property
    def overrides(self) -> dict[str, list[str]]:
        """For ``osler.diagnose.config.load``."""
        chosen = {"select": list(self.select), "ignore": list(self.ignore)}
        return {key: names for key, names in chosen.items() if names}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dir", type=Path, metavar="DIR", dest="directory", help="folder that keeps the runs (default: osler-runs beside the script, or $OSLER_DIR)")
    add("--name", help="name of this run (default: the script's)")
    add("--budget", type=fraction, default=0.02, metavar="SHARE", help="what watching may cost, as 2%% or 0.02 (default: 2%%)")
    add_output_options(parser)
    add("--fail-on", choices=SEVERITIES, metavar="SEVERITY", help="exit 1 if a finding is that severe or worse: " + ", ".join(SEVERITIES))
    add("--stop-on", choices=("fatal", "harmful"), metavar="SEVERITY", help="end the run at a finding that severe: fatal, harmful")
    add_choice_options(parser)
    add("--guard", action="store_true", help="leave out optimizer steps whose gradients are not finite (changes the run)")
    add("--locate", action="store_true", help="find the exact line of a non-finite value, at some cost in time")
    add("--quiet", action="store_true", help="say nothing on stderr; files and exit code only")
    add("--no-html", action="store_false", dest="html", help="do not write report.html")
    add("--color", choices=("auto", "always", "never"), default="auto", help="colours on the terminal (default: auto)")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--format", choices=FORMATS, help="form of --output: " + ", ".join(FORMATS))
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="write the findings in the chosen --format")


def add_choice_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--select", action="append", default=[], metavar="CAUSE", help="look only for this cause or group (repeatable)")
    parser.add_argument("--ignore", action="append", default=[], metavar="CAUSE", help="leave this cause or group out (repeatable)")


def fraction(text: str) -> float:
    """``2%`` or ``0.02``."""
    try:
        value = float(text.rstrip("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of the time; write it as 2% or 0.02")
    return value


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command: everything from the first word that is none of ours, or after ``--``."""
    valued = {option for action in parser._actions if action.nargs != 0 for option in action.option_strings}
    i = 0
    while i < len(words):
        word = words[i]
        if word == "--":
            return list(words[:i]), list(words[i + 1:])
        if word == "-m" or not word.startswith("-"):
            break
        i += 2 if word in valued else 1
    return list(words[:i]), list(words[i:])
