"""Runs scripts with and without osler in real processes. Most use a toy torch: the real one takes a second to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOY = {
    "torch/__init__.py": "from torch import nn\n\nclass Tensor:\n    pass\n\nLOADED = True\n",
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "def cross_entropy():\n    return 'original'\n",
}


class Bench:
    """A working directory with scripts in it."""

    def __init__(self, folder: Path, toys: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("OSLER_") and k != "PYTHONPATH"}
        self.env["PYTHONPATH"] = str(toys)
        self.env["OSLER_TEST_TOY"] = "1"

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def osler(self, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
        return self.call([sys.executable, "-m", "osler", *words], **more)

    def python(self, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
        return self.call([sys.executable, *words], **more)

    def call(self, words: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        env = {**self.env, **more.pop("env", {})}
        return subprocess.run(words, cwd=self.folder, env=env, capture_output=True, timeout=60, **more)

    def same(self, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
        """Asserts that output and exit code do not depend on osler, apart from osler's own lines on stderr."""
        plain, watched = self.python(*words, **more), self.osler("run", *words, **more)
        assert watched.stdout == plain.stdout
        assert others(watched.stderr) == others(plain.stderr)
        assert watched.returncode == plain.returncode
        return watched

    @property
    def runs(self) -> list[Path]:
        return sorted(p.parent for p in self.folder.glob("osler-runs/*/run.json"))

    @property
    def run(self) -> Path:
        assert len(self.runs) == 1
        return self.runs[0]


def others(stderr: bytes) -> list[bytes]:
    return [line for line in stderr.splitlines() if not line.startswith(b"osler: ")]


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for name, text in TOY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def bench(tmp_path: Path, toys: Path) -> Bench:
    return Bench(tmp_path, toys)
