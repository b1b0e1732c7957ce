"""``osler run``: start a training script, watch it, say what is wrong with it."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from osler.cli import command, options
from osler.core.errors import UsageError

HELP = "run a training script and watch it"
USAGE = "osler run [options] [--] train.py [arguments] | -m package.module [arguments] | command [arguments]"
EPILOG = "Everything after the script's name belongs to the script. The exit code is the script's own unless --fail-on says otherwise."
SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".sarif": "sarif", ".txt": "text"}


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("run", help=HELP, usage=USAGE, epilog=EPILOG)
    options.add_run_options(parser)
    parser.set_defaults(main=main, parser=parser)


def main(args: argparse.Namespace) -> int:
    """``args.command`` holds the words after our options."""
    chosen = options.Options(**{f.name: getattr(args, f.name) for f in fields(options.Options) if hasattr(args, f.name)})
    chosen = replace(chosen, select=tuple(args.select), ignore=tuple(args.ignore), format=form(args.format, args.output))
    if chosen.format and chosen.output is None and chosen.format != "text":
        raise UsageError(f"--format {chosen.format} wants --output FILE: stdout belongs to the script")
    what = command.resolve(args.command)
    for file in (chosen.json, chosen.output):
        if file is not None and not Path(os.path.abspath(file)).parent.is_dir():
            raise UsageError(f"there is no folder {file.parent} to write {file.name} into")
    from osler.cli import supervisor

    return supervisor.run(what, chosen)


def form(chosen: str | None, output: Path | None) -> str | None:
    """The format asked for, or the one that the name of the output file says."""
    return chosen or (SUFFIXES.get(output.suffix, "text") if output is not None else None)
