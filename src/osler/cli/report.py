"""``osler report``: diagnose a run that is over or still going, and show it in any form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from osler.cli import options, say
from osler.cli.run import form
from osler.cli.runs import add_place, root
from osler.core.errors import OslerError, UsageError

HELP = "show the findings of a run, also of one that is still going"


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("report", help=HELP)
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="name of the run, its beginning, its folder, or 'latest' (default)")
    add_place(parser)
    options.add_output_options(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the full report as one HTML file")
    options.add_choice_options(parser)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="colours on the terminal (default: auto)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Exit code 0: nothing harmful; 1: a finding harmful or worse; 2: it could not be judged."""
    from osler.cli import conclude
    from osler.cli.follow import Follower
    from osler.core.finding import LOUD
    from osler.core.window import End
    from osler.store import files, runs

    directory = runs.find(root(args.directory), args.run)
    chosen = {key: names for key, names in (("select", args.select), ("ignore", args.ignore)) if names}
    facts = files.read_json(directory / "run.json") or {}
    script = facts.get("script")
    start = Path(script).parent if isinstance(script, str) and Path(script).exists() else Path.cwd()
    follower = Follower(directory, chosen, start, complain)
    if chosen:
        from osler.diagnose import config

        config.load(start, chosen)
    raw = files.read_json(directory / "end.json")
    if raw is not None or not runs.alive(directory):
        raw = raw or {}
        follower.end = End(raw.get("code"), raw.get("signal"), raw.get("seconds"), bool(raw.get("out_of_memory")))
    follower.last_word()
    model = conclude.build(follower, Path(script).name if isinstance(script, str) else "the command")
    write(args, model)
    if any(f["severity"] in LOUD for f in model["findings"]):
        return 1
    return 0 if follower.windows else 2


def write(args: argparse.Namespace, model: dict[str, Any]) -> None:
    """To the files asked for; to stdout where none is."""
    from osler.cli import conclude

    kind = form(args.format, args.output) or "text"
    for file, what in ((args.json, "json"), (args.html, "html"), (args.output, kind)):
        if file is not None:
            try:
                file.write_text(conclude.render(model, what), encoding="utf-8")
            except OSError as problem:
                raise UsageError(f"cannot write {file}: {problem.strerror}") from None
            print(f"wrote {file}", file=sys.stderr)
    if args.output is None and not (args.format is None and (args.json or args.html)):
        color = "always" if say.stdout_colored(args.color) else "never"
        print(conclude.text(model, color) if kind == "text" else conclude.render(model, kind), end="")


def complain(text: str) -> None:
    """What the follower has to say is fatal here."""
    raise OslerError(text.removeprefix("osler: "))
