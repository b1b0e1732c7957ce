"""``--locate``: run the script once more, armed at the step where a value went wrong, and bring back operation and line.

The second run prints nothing and is ended as soon as the answer is there. It repeats the script's own side effects (files it
writes), which is why it happens only when asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from osler.cli.command import Command
from osler.cli.options import Options
from osler.core.facts import Fact

PATIENCE = 3.0
"""The second run may take this many times as long as the first, and 30 seconds more."""


def wanted(directory: Path) -> Fact | None:
    """The first non-finite value of the finished run, if there is one."""
    from osler.store.reader import RunReader

    reader = RunReader(directory)
    reader.refresh()
    for rank in reader.ranks():
        for fact in reader.window(rank).facts("nonfinite"):
            if fact.get("what") in ("loss", "gradient"):
                return fact
    return None


def locate(directory: Path, command: Command, options: Options, seconds: float) -> str | None:
    """Re-run and append the located fact to the run's own. Returns operation and line, ``None`` if none was met."""
    from osler.cli.supervisor import environment
    from osler.store import files

    target = wanted(directory)
    if target is None or target.get("line_by") == "re-run":
        return None
    place = directory / "locate"
    place.mkdir(exist_ok=True)
    files.write_json(place / "run.json", {"schema": 1, "id": "locate", "command": list(command.shown), "cwd": os.getcwd()})
    env = {**environment(os.environ, place, options), "OSLER_LOCATE_STEP": str(target.step)}
    nowhere = subprocess.DEVNULL
    child = subprocess.Popen(list(command.words), env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    deadline = time.monotonic() + PATIENCE * seconds + 30.0
    found = None
    while found is None and time.monotonic() < deadline:
        ended = child.poll() is not None
        found = answer(place)
        if ended:
            break
        time.sleep(0.1)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    found = found or answer(place)
    if found is None:
        return None
    for facts in sorted(directory.glob("rank-*/facts.jsonl"))[:1]:
        with facts.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
    fact = Fact.from_json(found)
    return f"{fact.get('op')} at {fact.at}"


def answer(place: Path) -> dict[str, Any] | None:
    """The fact that the armed run wrote, once it is there."""
    for path in place.glob("rank-*/facts.jsonl"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"re-run"' in line:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if row.get("kind") == "nonfinite" and isinstance(row, dict):
                    return row
    return None
