"""``osler export``: a run as tables for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from osler.cli.runs import add_place, root

HELP = "write the recorded signals as Parquet, CSV or SQLite"
SUFFIXES = {".sqlite": "sqlite", ".db": "sqlite", ".csv": "csv", ".parquet": "parquet"}


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("export", help=HELP)
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="name of the run, its beginning, its folder, or 'latest' (default)")
    add_place(parser)
    parser.add_argument("--to", choices=("parquet", "csv", "sqlite"), required=True, metavar="FORMAT", help="parquet, csv (a folder of tables) or sqlite (one file)")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT", help="where to (default: named like the run)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from osler.store import runs
    from osler.store.export import export

    directory = runs.find(root(args.directory), args.run)
    out = args.output or Path(f"{directory.name}.sqlite" if args.to == "sqlite" else f"{directory.name}-{args.to}")
    for path in export(directory, args.to, out):
        print(path)
    return 0
