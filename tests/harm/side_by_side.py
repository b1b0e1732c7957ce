"""Runs a script alone and under ``osler run``, and says what differs. Knows nothing of osler but its command line.

stdout has to be the same to the byte, the exit code the same as a shell sees it, and stderr the same apart from lines that
start with ``osler`` and what torch itself prints with a clock in it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
WATCH = (sys.executable, "-m", "osler", "run", "--quiet")
DYNAMO_STAMP = re.compile(rb"^([A-Z])\d{4} [\d:.]+ \d+ ", re.MULTILINE)
CLOCKED = re.compile(rb"^\[rank\d+\]:|^\[W\d+ |^USDT:")
"""Lines of torch's C++ parts with a clock in them, which several processes print in any order."""


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: bytes
    stderr: bytes

    @property
    def as_shell(self) -> int:
        """128 + n for a death by signal n, whether the shell or a supervisor says so."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def own_stderr(self) -> list[bytes]:
        """Lines of the script, without ours."""
        lines = DYNAMO_STAMP.sub(rb"\1 ", self.stderr).splitlines()
        return [line for line in lines if not line.startswith(b"osler") and not CLOCKED.match(line)]

    @property
    def our_stderr(self) -> str:
        return "\n".join(line.decode(errors="replace") for line in self.stderr.splitlines() if line.startswith(b"osler"))


def environment(runs: Path | str, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OSLER", "PYTEST", "COV_", "VIRTUAL_ENV"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OSLER_DIR": str(runs), **more}


def run(command: Sequence[str | Path], folder: Path, env: dict[str, str], timeout: float = 240, stdin: bytes = b"",
        **more: Any) -> Outcome:
    done = subprocess.run([str(c) for c in command], cwd=folder, env=env, input=stdin, capture_output=True, timeout=timeout, **more)
    return Outcome(done.returncode, done.stdout, done.stderr)


def launcher(script: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The plain command, and what comes after ``osler run`` in its place."""
    if arguments[:1] == ["torchrun"]:
        plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *arguments]
        return plain, ["--", *plain]
    return [sys.executable, script, *arguments], [script, *arguments]


def differences(plain: Outcome, watched: Outcome) -> list[str]:
    """Empty when nobody can tell the two apart."""
    found = []
    if plain.as_shell != watched.as_shell:
        found.append(f"exit code: {plain.as_shell} alone, {watched.as_shell} watched")
    for name, a, b in (("stdout", plain.stdout.splitlines(), watched.stdout.splitlines()),
                       ("stderr", plain.own_stderr, watched.own_stderr)):
        if a != b or (name == "stdout" and plain.stdout != watched.stdout):
            shown = difflib.unified_diff([x.decode(errors="replace") for x in a], [x.decode(errors="replace") for x in b],
                                         "alone", "watched", lineterm="", n=1)
            found.append(f"{name}:\n" + "\n".join([line[:300] for line in shown][:40]))
    return found


def copy_scripts(folder: Path) -> Path:
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__", "osler-runs"))
    return folder


def facts(runs: Path) -> Iterator[dict[str, Any]]:
    """All facts under a folder of runs; torn lines are left out."""
    for file in sorted(runs.rglob("facts.jsonl")):
        for line in file.read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def own_failures(runs: Path) -> list[str]:
    """What osler's guard caught of its own errors during a run: nothing of it reaches the user, and there should be none."""
    caught = [f["data"]["text"] for f in facts(runs) if f.get("kind") == "self" and f["data"].get("what") in {"guard", "disarmed"}]
    logs = [f"{file.name}: {line}" for file in runs.rglob("attach.log") for line in file.read_text().splitlines()
            if "not watched" in line]
    return caught + logs


def recorded(runs: Path) -> bool:
    """Whether a watched process wrote anything there."""
    return any(file.stat().st_size for file in runs.rglob("facts.jsonl"))
