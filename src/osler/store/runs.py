"""Where runs live, what they are called, and which are pruned. Their contents are read by ``reader``."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from osler.core.errors import RunNotFound, UsageError
from osler.store.files import read_json

_ID = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-.+")
_DAY = 86400.0


def default_root(script_dir: Path, create: bool = True) -> Path:
    """``OSLER_DIR``, or ``osler-runs`` beside the script. A folder made here is hidden from git by its own ``.gitignore``.

    Raises:
        UsageError: the folder cannot be made.
    """
    named = os.environ.get("OSLER_DIR")
    root = Path(named).expanduser() if named else Path(script_dir) / "osler-runs"
    if create and not root.is_dir():
        try:
            root.mkdir(parents=True)
            (root / ".gitignore").write_text("*\n")
        except FileExistsError:
            pass  # another process was faster
        except OSError as error:
            raise UsageError(f"cannot make {root}: {error.strerror}. Try: OSLER_DIR=/some/folder") from None
    return root


def new_run(root: Path, name: str) -> Path:
    """Make the directory of a new run, e.g. ``2026-11-30-131500-train-a1b2`` for ``train.py``.

    Raises:
        UsageError: the directory cannot be made.
    """
    stem = re.sub(r"\.py$", "", re.split(r"[/\\]", name)[-1])
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", stem).strip("-")[:40] or "run"
    while True:
        # secrets draws from the system, never from a generator that the script seeded.
        path = Path(root) / f"{_stamp(time.time())}-{slug}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot make {path}: {error.strerror}. Try: OSLER_DIR=/some/folder") from None


def list_runs(root: Path) -> list[Path]:
    """Directories of runs, newest first."""
    found = []
    try:
        for path in Path(root).iterdir():
            if not path.name.startswith("."):
                try:
                    written = (path / "run.json").stat().st_mtime
                    named = path.name[:17] if _ID.fullmatch(path.name) else _stamp(written)
                    found.append((named, written, path))
                except OSError:
                    continue
    except OSError:
        return []
    # The time in the name has seconds only; the file decides between runs of one second.
    return [path for *_, path in sorted(found, reverse=True)]


def find(root: Path, text: str = "latest") -> Path:
    """The run meant by ``latest``, a path, an exact id, or the unambiguous beginning of one.

    Raises:
        RunNotFound: none or several match.
    """
    if (Path(text) / "run.json").is_file():
        return Path(text)
    runs = list_runs(root)
    if text == "latest" and runs:
        return runs[0]
    matches = [p for p in runs if p.name == text] or [p for p in runs if p.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RunNotFound(f"{len(matches)} runs match {text!r}: {_names(matches)}. Give more of the name")
    raise RunNotFound(f"no run matches {text!r} under {root}; {describe_newest(Path(root) / 'x')}. Try: osler runs")


def describe_newest(directory: Path) -> str:
    """The newest runs in or beside a directory, for error messages."""
    runs = list_runs(directory) or list_runs(directory.parent)
    return f"newest runs: {_names(runs)}" if runs else "there are no runs there"


def alive(run: Path) -> bool:
    """Whether the run may still be recording.

    A run without ``end.json`` counts as alive while its process lives; one of another host, or without a known process,
    while it was written to within the last day.
    """
    if (run / "end.json").exists():
        return False
    info = read_json(run / "run.json") or {}
    pid, host = info.get("pid"), info.get("host")
    # On Windows os.kill would end the process instead of asking for it.
    if isinstance(pid, int) and pid > 0 and host in (None, socket.gethostname()) and os.name == "posix":
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return True
    return time.time() - _touched(run) < _DAY


def prune(root: Path, keep: int = 50) -> list[Path]:
    """Delete all but the newest ``keep`` runs, never one that is alive; returns the deleted ones."""
    gone = []
    for path in list_runs(root)[max(0, keep):]:
        if not _ID.fullmatch(path.name) or path.is_symlink() or alive(path):
            continue
        # Renamed first, so that a deletion cut short leaves no half run in the list.
        hidden = path.with_name(f".deleted-{path.name}")
        try:
            path.rename(hidden)
        except OSError:
            continue
        gone.append(path)
    for hidden in Path(root).glob(".deleted-*"):
        shutil.rmtree(hidden, ignore_errors=True)
    return gone


def _stamp(moment: float) -> str:
    return time.strftime("%Y-%m-%d-%H%M%S", time.localtime(moment))


def _touched(run: Path) -> float:
    times = [0.0]
    for path in [run, *run.glob("*"), *run.glob("rank-*/*")]:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _names(runs: list[Path]) -> str:
    return ", ".join(p.name for p in runs[:3]) + (", ..." if len(runs) > 3 else "")
