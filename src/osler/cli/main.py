"""``osler``: finds the verb, and turns whatever goes wrong into one line and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from osler import __version__
from osler.cli import explain, export, report, run, runs
from osler.cli.options import Parser, split
from osler.core.errors import OslerError, UsageError

VERBS = (run, runs, report, export, explain)
ABOUT = "Finds out why a neural network does not train, and proves it."
EPILOG = "Start with: osler run train.py"


def build() -> Parser:
    parser = Parser("osler", description=ABOUT, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"osler {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    for verb in VERBS:
        verb.add_parser(verbs)
    parser.verbs = tuple(verbs.choices)
    return parser


def hint(word: str, verbs: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, verbs, n=1)
    if near and not os.path.exists(word):
        return f" Did you mean {near[0]}?"
    return f" Try: osler {'run ' + word if os.path.exists(word) else '--help'}"


def dispatch(words: Sequence[str]) -> int:
    """Run one command line and return its exit code; raises ``OslerError``."""
    parser = build()
    if not words:
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    if words[0] == "run":
        verb: Parser = parser.parse_args(["run"]).parser
        ours, command = split(verb, words[1:])
        args = verb.parse_args(ours)
        args.command = command
        return int(args.main(args))
    if not words[0].startswith("-") and words[0] not in parser.verbs:
        raise UsageError(f"no verb {words[0]}.{hint(words[0], parser.verbs)}")
    args = parser.parse_args(list(words))
    if not hasattr(args, "main"):
        raise UsageError("which verb? Try: osler --help")
    return int(args.main(args))


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; never returns and never shows a traceback of ours."""
    try:
        code = dispatch(sys.argv[1:] if words is None else words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OslerError as problem:
        complain(str(problem))
        code = problem.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains while it shuts down
        code = 141
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception as problem:
        if os.environ.get("OSLER_DEBUG"):
            raise
        complain(f"internal error: {type(problem).__name__}: {problem} (OSLER_DEBUG=1 shows where)")
        code = OslerError.exit_code
    sys.exit(code)


def complain(text: str) -> None:
    try:
        print("osler: " + " ".join(text.split()), file=sys.stderr, flush=True)
    except OSError:
        pass
