"""``osler run`` from start to exit code: prepare a run folder, start the child, follow it, conclude.

The child is started before anything heavy is imported, and nothing that goes wrong here changes what it does or how it
ends. Killing the supervisor leaves the training running.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import osler
from osler.cli import say
from osler.cli.child import Child, Ended, end_like
from osler.cli.command import Command, NoCommand
from osler.cli.follow import Follower, reaches
from osler.cli.memory import counters, killed_since
from osler.cli.options import Options

SITE = Path(osler.__file__).parent / "watch" / "site"
HOME = Path(osler.__file__).parent.parent
KEEP = 50
"""Runs kept in a folder."""
TICK = 0.25
GRACE = 10.0
"""Seconds between the steps of ``--stop-on``: SIGINT, SIGTERM, SIGKILL."""


def run(command: Command, options: Options) -> int:
    """Watch the command; returns the exit code, or dies by the signal that the child died of."""
    if options.select or options.ignore:
        check_causes(command, options)
    directory = prepare(command, options)
    child, memory = Child(), counters()
    try:
        child.start(command.words, environment(os.environ, directory, options) if directory else os.environ)
    except OSError as problem:
        raise NoCommand(f"{command.words[0]} cannot be started: {problem.strerror}") from None
    if directory is None:
        return end_like(wait_only(child))
    stay_small()
    note_pid(directory, child.pid)
    subject = " ".join(command.shown[:2]) if command.shown[0] == "-m" else Path(command.script or command.shown[0]).name
    follower = Follower(directory, options.overrides, command.home, quiet if options.quiet else say.say)
    ended = watch(child, follower, options)
    failed = False
    try:
        if options.locate:
            locate_again(directory, command, options, follower, ended)
        failed = finish(follower, options, ended, ended.status != 0 and killed_since(memory), subject)
    except KeyboardInterrupt:
        say.say("osler: interrupted while reporting")
    except Exception:
        follower.trouble("concluding failed")
    return 1 if failed else end_like(ended)


def locate_again(directory: Path, command: Command, options: Options, follower: Follower, ended: Ended) -> None:
    from osler.cli.locate import locate, wanted

    try:
        if wanted(directory) is not None:
            if not options.quiet:
                say.say("osler: running the script once more, armed at the step where a value went wrong (--locate)")
            found = locate(directory, command, options, ended.seconds)
            if not options.quiet:
                say.say(f"osler: the second run {'names' if found is not None else 'met no'} the operation" + (f": {found}" if found else ""))
    except Exception:
        follower.trouble("locating failed")


def check_causes(command: Command, options: Options) -> None:
    """A misspelt cause is refused before the run rather than noticed after it. Raises ``UsageError``."""
    from osler.diagnose import config

    config.load(command.home, options.overrides)


def prepare(command: Command, options: Options) -> Path | None:
    """A new run folder with ``run.json``, or ``None`` and one line when there can be none."""
    try:
        from osler.store import files, runs

        root = options.directory if options.directory is not None else runs.default_root(command.home)
        directory = Path(os.path.abspath(runs.new_run(root, options.name or command.title)))
        files.write_json(directory / "run.json", {
            "schema": 1, "id": directory.name, "name": options.name or command.title, "command": list(command.shown),
            "started_with": list(command.words), "script": str(command.script) if command.script else None,
            "cwd": os.getcwd(), "started": time.time(), "osler": osler.__version__, "budget": options.budget,
            "platform": sys.platform, "host": socket.gethostname(), "pid": os.getpid()})
        return directory
    except Exception as problem:
        if not options.quiet:
            say.say(f"osler: no run folder can be made ({problem}); the script runs unwatched")
        return None


def note_pid(directory: Path, pid: int) -> None:
    """The run lives as long as the child does, even where the supervisor is killed."""
    from osler.store import files

    try:
        files.write_json(directory / "run.json", {**(files.read_json(directory / "run.json") or {}), "pid": pid})
    except OSError:
        pass


def environment(base: Mapping[str, str], directory: Path, options: Options) -> dict[str, str]:
    """The child's: the site folder first on PYTHONPATH, and what the watcher needs to know."""
    given = base.get("PYTHONPATH")
    # Kept as written: an empty entry means the working directory.
    paths = [str(SITE), *(p for p in (given.split(os.pathsep) if given else ()) if p != str(SITE))]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OSLER_RUN": str(directory), "OSLER_HOME": str(HOME),
           "OSLER_BUDGET": f"{options.budget:g}", "OSLER_GUARD": "1" if options.guard else ""}
    clean = {name: value for name, value in base.items() if name not in own}
    return {**clean, **{name: value for name, value in own.items() if value}}


def stay_small() -> None:
    """The machine belongs to the training: no thread pool of ours, and the lower priority."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    try:
        os.nice(5)
    except (OSError, AttributeError):
        pass


def quiet(text: str) -> None:
    """Where lines go under ``--quiet``."""


def wait_only(child: Child) -> Ended:
    ended = None
    while ended is None:
        ended = child.wait(60.0)
    child.let_go()
    return ended


def watch(child: Child, follower: Follower, options: Options) -> Ended:
    """Until the child is over: look, say what is new, stop a lost run if asked to."""
    stop = Stop(child, follower, options)
    ended = None
    while ended is None:
        ended = child.wait(TICK)
        if ended is None:
            try:
                announce(follower, options, stop)
                stop.tick()
            except Exception:
                follower.trouble("watching failed")
    child.let_go()
    return ended


def announce(follower: Follower, options: Options, stop: Stop | None = None) -> None:
    """Say what is new; begin to stop if that is asked for."""
    for finding in follower.tick():
        if not options.quiet:
            from osler.report import terminal

            say.say(terminal.one_line(finding))
        if stop is not None and reaches(finding.severity, options.stop_on):
            stop.begin(finding.cause)


class Stop:
    """Ends the run the way a patient user would: Ctrl-C, then SIGTERM, then SIGKILL."""

    def __init__(self, child: Child, follower: Follower, options: Options) -> None:
        self._child, self._follower, self._options = child, follower, options
        self._steps: list[tuple[float, int]] = []

    def begin(self, cause: str) -> None:
        if self._steps:
            return
        if not self._options.quiet:
            say.say(f"osler: stopping the run because of {cause} (--stop-on {self._options.stop_on})")
        now = time.monotonic()
        kill = getattr(signal, "SIGKILL", signal.SIGTERM)
        self._steps = [(now, signal.SIGINT), (now + GRACE, signal.SIGTERM), (now + 2 * GRACE, kill)]
        self.tick()

    def tick(self) -> None:
        if self._steps and time.monotonic() >= self._steps[0][0]:
            _, number = self._steps.pop(0)
            for pid in self._trainers() | ({self._child.pid} if number == signal.SIGINT else descendants(self._child.pid)):
                try:
                    os.kill(pid, number)
                except OSError:
                    pass

    def _trainers(self) -> set[int]:
        """The processes that train; a shell or a launcher in between does not pass signals on."""
        alive = descendants(self._child.pid)
        facts = [w.last("attached") for w in self._follower.windows.values()]
        return {pid for fact in facts if fact is not None and isinstance(pid := fact.get("pid"), int) and pid in alive}


def descendants(pid: int) -> set[int]:
    """The process and everything below it; where there is no ``/proc``, the process alone."""
    children: dict[int, list[int]] = {}
    try:
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    text = Path(entry.path, "stat").read_text()
                except OSError:
                    continue
                children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    except OSError:
        pass
    found, todo = {pid}, [pid]
    while todo:
        below = [p for p in children.get(todo.pop(), []) if p not in found]
        found.update(below)
        todo += below
    return found


def finish(follower: Follower, options: Options, ended: Ended, out_of_memory: bool, subject: str) -> bool:
    """``end.json``, the last word, and room for the next run. Returns whether ``--fail-on`` wants exit code 1."""
    if ended.signal == getattr(signal, "SIGKILL", None) and not options.quiet:
        say.say("osler: killed by the kernel: out of memory" if out_of_memory else
                "osler: killed (SIGKILL), often the out-of-memory killer")
    return finish_run(follower, options, subject, {
        "code": ended.code, "signal": ended.signal_name, "seconds": round(ended.seconds, 3), "out_of_memory": out_of_memory})


def finish_run(follower: Follower, options: Options, subject: str, how: dict[str, Any]) -> bool:
    """The part that the sidecar shares. ``how`` are the fields of ``end.json``."""
    from osler.cli.conclude import conclude
    from osler.core.window import End
    from osler.store import files, runs

    try:
        files.write_json(follower.directory / "end.json", how)
    except OSError:
        follower.trouble("end.json could not be written")
    follower.end = End(how["code"], how["signal"], how["seconds"], how["out_of_memory"])
    failed = conclude(follower, options, subject)
    try:
        runs.prune(follower.directory.parent, KEEP)
    except Exception:
        follower.trouble("old runs could not be removed")
    if sys.stderr is not None:
        sys.stderr.flush()
    return failed
