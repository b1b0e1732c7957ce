"""From the words after ``osler run`` to the command that is started: scripts and ``-m`` get a Python, the rest is as typed."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from osler.core.errors import OslerError, UsageError


class NoScript(OslerError):
    """The script named on the command line is not there."""

    exit_code = 66


class NoCommand(OslerError):
    """The program named on the command line is not there; the code is the one shells give."""

    exit_code = 127


@dataclass(frozen=True, slots=True)
class Command:
    """What to start.

    Attributes:
        words: as passed to the operating system.
        shown: as the user typed it.
        script: path of the script, where there is one.
    """

    words: tuple[str, ...]
    shown: tuple[str, ...]
    script: Path | None = None

    @property
    def home(self) -> Path:
        """Folder beside which the runs are kept."""
        return self.script.parent if self.script is not None else Path.cwd()

    @property
    def title(self) -> str:
        """Short, for the run's name."""
        if self.script is not None:
            return self.script.stem
        if self.shown[0] == "-m":
            return self.shown[1].rpartition(".")[2]
        return Path(self.shown[0]).stem


def resolve(words: Sequence[str]) -> Command:
    """Read ``train.py ...``, ``-m pkg.mod ...`` or any other command.

    Raises:
        UsageError: there is nothing to run.
        NoScript, NoCommand: the script or program does not exist.
    """
    if not words:
        raise UsageError("nothing to run. Try: osler run train.py")
    first = words[0]
    if first == "-m":
        if len(words) < 2:
            raise UsageError("-m wants the name of a module. Try: osler run -m package.train")
        return Command((python(), *words), tuple(words))
    path = Path(first)
    if first.endswith((".py", ".pyw")) or (path / "__main__.py").is_file():
        if not path.exists():
            raise NoScript(f"no file {first} here.{similar(path)}")
        return Command((python(), *words), tuple(words), Path(os.path.abspath(path)))
    if shutil.which(first) is None:
        raise NoCommand(f"no program {first} on PATH.{similar(path)}")
    return Command(tuple(words), tuple(words), find_script(words))


def find_script(words: Sequence[str]) -> Path | None:
    """The first ``.py`` file among the words of a launcher (``torchrun --nproc-per-node 2 train.py``)."""
    for word in words:
        if word.endswith(".py") and os.path.isfile(word):
            return Path(os.path.abspath(word))
    return None


def similar(path: Path) -> str:
    """`` Did you mean train.py?`` or nothing."""
    folder = path.parent
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(".py") and entry.is_file()]
    except OSError:
        return f" There is no folder {folder} either."
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" Did you mean {folder / near[0]}?" if near else ""


def python() -> str:
    """The Python that ``python train.py`` would have been: of the active environment, else the one osler runs in.

    Where osler lives in an environment of its own (pipx, uv tool) that has no torch, the ``python`` on PATH is meant.
    """
    active = os.environ.get("VIRTUAL_ENV")
    if active:
        inside = Path(active, "Scripts", "python.exe") if os.name == "nt" else Path(active, "bin", "python")
        if inside.exists():
            return str(inside)
    if find_spec("torch") is None:
        return shutil.which("python") or shutil.which("python3") or sys.executable
    return sys.executable
