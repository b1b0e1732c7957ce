"""``osler explain``: the page of a cause, or the list of all."""

from __future__ import annotations

import argparse
from typing import Any

from osler.cli import say

HELP = "say what a cause is, how it is seen and what to do"


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("explain", help=HELP)
    parser.add_argument("cause", nargs="?", metavar="CAUSE", help="id of a cause; without one, all are listed")
    parser.add_argument("--list", action="store_true", dest="everything", help="list all causes")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours on the terminal (default: auto)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from osler.diagnose import catalogue

    if args.cause is None or args.everything:
        print(listing(), end="")
        return 0
    page = catalogue.explain(args.cause)
    if say.stdout_colored(args.color):
        show(page)
    else:
        print(page, end="" if page.endswith("\n") else "\n")
    return 0


def listing() -> str:
    """Every cause with its meaning, by group; those without a rule yet are marked."""
    from osler.diagnose import catalogue
    from osler.diagnose.meanings import GROUP

    groups: dict[str, list[str]] = {}
    for cause in catalogue.known():
        rule = catalogue.rule_for(cause)
        groups.setdefault(rule.group if rule else GROUP.get(cause, "other"), []).append(cause)
    width = max((len(cause) for causes in groups.values() for cause in causes), default=0)
    lines = []
    for group in sorted(groups):
        lines += [group, *(f"  {cause.ljust(width)}  {catalogue.meaning(cause)}{'' if catalogue.rule_for(cause) else ' (no rule yet)'}"
                           for cause in sorted(groups[group])), ""]
    return "\n".join(lines) + "Try: osler explain CAUSE\n"


def show(page: str) -> None:
    """Markdown laid out for a terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width), force_terminal=True).print(Markdown(page))
