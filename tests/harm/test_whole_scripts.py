"""Do no harm, over scripts that were not written for it: the examples, and every script of the case zoo where there is one.

A line at their start makes them print a hash of the final parameters and of the random states at exit. Lines that differ
between two runs *without* osler (a clock, an unseeded generator) are not compared.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from pathlib import Path

import pytest
from side_by_side import HERE, ROOT, WATCH, Outcome, differences, environment, own_failures, run

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.py") if "osler-runs" not in path.parts)
ZOO = sorted(path for path in (ROOT.parent / "shared" / "zoo").glob("*/*.py") if path.name in {"train.py", "fixed.py"})


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def with_prologue(source: str) -> str:
    """The script with one import on the line where its first statement after docstring and ``__future__`` begins."""
    body = ast.parse(source).body
    skip = 0
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node is body[0]
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        skip = node.end_lineno or 0
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:skip], "import _prologue\n", *lines[skip:]])


def stable(one: bytes, other: bytes, text: bytes) -> bytes:
    """``text`` without the lines that differ between ``one`` and ``other``."""
    a, b, lines = one.splitlines(), other.splitlines(), text.splitlines()
    if len(a) != len(b):
        return b""
    return b"\n".join(line for i, line in enumerate(lines) if i >= len(a) or a[i] == b[i])


def compare(path: Path, tmp_path: Path) -> None:
    work, runs = tmp_path / "work", tmp_path / "runs"
    shutil.copytree(path.parent, work, ignore=shutil.ignore_patterns("__pycache__", "osler-runs", "truth.json"))
    shutil.copy(HERE / "_prologue.py", work)
    (work / path.name).write_text(with_prologue(path.read_text()))
    env = environment(runs)

    def fresh(command: list[str]) -> Outcome:
        folder = tmp_path / "here"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work, folder)
        return run(command, folder, env, timeout=600)

    alone = fresh([sys.executable, path.name])
    watched = fresh([*WATCH, path.name])
    if differences(alone, watched):
        again = fresh([sys.executable, path.name])
        if differences(alone, again):
            alone, watched = (Outcome(o.code, stable(alone.stdout, again.stdout, o.stdout),
                                      b"" if alone.own_stderr != again.own_stderr else o.stderr) for o in (alone, watched))
    assert not differences(alone, watched), "\n".join(differences(alone, watched)) + "\n" + watched.our_stderr
    assert not own_failures(runs)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=named)
def test_examples(path: Path, tmp_path: Path, osler_runs: None) -> None:
    compare(path, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("OSLER_TEST_ZOO" not in os.environ, reason="the whole zoo takes half an hour: OSLER_TEST_ZOO=1, or scripts/test-all")
@pytest.mark.parametrize("path", ZOO, ids=named)
def test_zoo(path: Path, tmp_path: Path, osler_runs: None) -> None:
    compare(path, tmp_path)


def test_prologue_goes_after_docstring_and_future() -> None:
    assert with_prologue('"""x\ny"""\nfrom __future__ import annotations\nimport a\n').splitlines()[3] == "import _prologue"
    assert with_prologue("import a\n").startswith("import _prologue\n")
