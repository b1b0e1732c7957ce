"""Skips what needs a finished ``osler run`` where there is none, and keeps runs out of the tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from side_by_side import WATCH, copy_scripts, environment


@pytest.fixture(scope="session")
def osler_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fails early, with one clear message, where ``osler run`` itself does not work."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "nothing.py").write_text("print('ran')\n")
    done = subprocess.run([*WATCH, "nothing.py"], cwd=folder, env=environment(folder / "runs"), capture_output=True, text=True, timeout=60)
    if done.stdout != "ran\n" or done.returncode:
        pytest.fail(f"osler run cannot run a script that prints one line: exit {done.returncode}, {done.stderr[-500:]}", pytrace=False)


@pytest.fixture
def scripts(tmp_path: Path, osler_runs: None) -> Path:
    """A private copy of ``scripts/``."""
    return copy_scripts(tmp_path / "scripts")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
