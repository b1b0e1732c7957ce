"""``python -m osler.sidecar DIR PID``: the supervisor's engine for a process that called ``osler.watch(...)`` in its own code.

There is no child to start: it follows the run folder until the process is gone or says that it ends, then shows the verdict.
Start it in a session of its own, so that the terminal's Ctrl-C does not end it before the process it follows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from osler.cli import say
from osler.cli.follow import Follower
from osler.cli.options import Options, Parser
from osler.core.errors import OslerError

TICK = 0.25


def main(words: list[str] | None = None) -> int:
    parser = Parser("osler.sidecar", description="Follows a run that was started in code.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run folder")
    parser.add_argument("pid", type=int, metavar="PID", help="the process that trains")
    parser.add_argument("--quiet", action="store_true", help="write files only")
    parser.add_argument("--no-html", action="store_false", dest="html")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    args = parser.parse_args(words)
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    return follow(args)


def follow(args: argparse.Namespace) -> int:
    from osler.cli import supervisor
    from osler.core.window import Window
    from osler.store import files

    supervisor.stay_small()
    directory = Path(os.path.abspath(args.directory))
    run = files.read_json(directory / "run.json") or {}
    options = Options(quiet=args.quiet, html=args.html, color=args.color)
    follower = Follower(directory, {}, Path(str(run.get("cwd") or ".")), supervisor.quiet if args.quiet else say.say)
    started = time.monotonic()

    def over() -> bool:
        return any(w.last("exit") is not None for w in follower.windows.values())

    while alive(args.pid) and not over():
        time.sleep(TICK)
        supervisor.announce(follower, options)
    try:
        follower.last_word()
    except Exception:
        follower.trouble("the final diagnosis failed")
    window = follower.primary or Window()
    crashed, orderly = window.last("exception") is not None, window.last("exit") is not None
    supervisor.finish_run(follower, options, str(run.get("name") or "this process"), {
        "code": 1 if crashed else 0 if orderly else None, "signal": None, "seconds": round(time.monotonic() - started, 3),
        "out_of_memory": False})
    return 0


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has collected yet (a zombie) does not."""
    if os.name == "nt":  # there os.kill would end it
        import ctypes

        kernel: Any = getattr(ctypes, "windll").kernel32
        handle = kernel.OpenProcess(0x00100000, False, pid)
        gone = not handle or kernel.WaitForSingleObject(handle, 0) == 0
        kernel.CloseHandle(handle)
        return not gone
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OslerError as problem:
        print(f"osler: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
