"""Places of runs, their names, which are pruned; and export."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from store_data import all_streams, make_run, write_run

from osler.core.errors import MissingExtra, RunNotFound, UsageError
from osler.store import runs
from osler.store.export import export
from osler.store.reader import RunReader
from osler.store.writer import Writer


def test_default_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSLER_DIR", raising=False)
    assert runs.default_root(tmp_path, create=False) == tmp_path / "osler-runs" and not (tmp_path / "osler-runs").exists()
    assert (runs.default_root(tmp_path) / ".gitignore").read_text() == "*\n"
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("OSLER_DIR", str(tmp_path / "mine"))
    assert runs.default_root(tmp_path) == tmp_path / "mine" and not list((tmp_path / "mine").iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSLER_DIR", str(tmp_path / "file" / "x"))
    with pytest.raises(UsageError, match=r"cannot make .*Try: OSLER_DIR="):
        runs.default_root(tmp_path)


def test_names_are_readable_and_sortable(tmp_path: Path) -> None:
    path = runs.new_run(tmp_path, "/home/me/my train (2).py")
    assert path.is_dir() and re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-my-train-2-[0-9a-f]{4}", path.name)
    assert "-run-" in runs.new_run(tmp_path, "...").name
    assert len({runs.new_run(tmp_path, "a.py") for _ in range(20)}) == 20


def test_find(tmp_path: Path) -> None:
    names = ["2026-11-30-131500-train-a1b2", "2026-11-30-131500-train-0000", "2026-12-01-080000-other-ffff"]
    for age, name in enumerate(names):
        make_run(tmp_path / name)
        os.utime(tmp_path / name / "run.json", (1e9 + age, 1e9 + age))
    (tmp_path / "2026-12-02-080000-empty-0000").mkdir()  # nothing began there
    assert [p.name for p in runs.list_runs(tmp_path)] == [names[2], names[1], names[0]]
    assert runs.find(tmp_path).name == names[2] and runs.find(tmp_path, "2026-12").name == names[2]
    assert runs.find(tmp_path, names[0]).name == names[0]
    assert runs.find(tmp_path / "elsewhere", str(tmp_path / names[0])) == tmp_path / names[0]
    with pytest.raises(RunNotFound, match=f"2 runs match '2026-11': {names[1]}, {names[0]}. Give more of the name"):
        runs.find(tmp_path, "2026-11")
    with pytest.raises(RunNotFound, match=f"no run matches 'x' under .*; newest runs: {names[2]}, .*Try: osler runs"):
        runs.find(tmp_path, "x")
    with pytest.raises(RunNotFound, match="there are no runs there"):
        runs.find(tmp_path / "elsewhere")


@pytest.mark.skipif(os.name != "posix", reason="asks for a living process by signal 0")
def test_prune_spares_the_living(tmp_path: Path) -> None:
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    here = socket.gethostname()
    cases = {"ended": {"pid": os.getpid(), "host": here}, "living": {"pid": os.getpid(), "host": here},
             "killed": {"pid": finished.pid, "host": here}, "elsewhere": {"pid": finished.pid, "host": "other"}, "nameless": {},
             "stale": {"pid": 1, "host": "other"}}
    made = {}
    for i, (name, info) in enumerate(cases.items()):
        made[name] = make_run(tmp_path / f"2026-11-30-13150{i}-{name}-0000", **info)
    made["new"] = make_run(tmp_path / "2026-12-30-131500-new-0000", pid=finished.pid, host=here)
    (made["ended"] / "end.json").write_text("{}")
    (make_run(tmp_path / "precious") / "thesis.tex").write_text("")
    os.utime(tmp_path / "precious" / "run.json", (1e9, 1e9))
    for path in (made["stale"], made["stale"] / "run.json"):
        os.utime(path, (time.time() - 2e5,) * 2)
    assert runs.prune(tmp_path, keep=10) == []
    gone = runs.prune(tmp_path, keep=1)
    assert set(gone) == {made["ended"], made["killed"], made["stale"]}
    assert not any(p.exists() for p in gone) and not list(tmp_path.glob(".deleted-*")) and (tmp_path / "precious").exists()
    assert runs.prune(tmp_path / "none") == []


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("export") / "run"
    write_run(run, steps=40)
    write_run(run, steps=30, rank=1)
    writer = Writer(run, rank=1)
    writer.open()
    writer.row("rows", (0, 0, 0, 0, -1, 2**64 - 1))
    writer.row("steps", (1, 0.5, 0, 1, float("nan"), float("inf"), 1, 1, 1, 1))
    writer.close()
    return run


def test_csv(two_ranks: Path, tmp_path: Path) -> None:
    written = export(two_ranks, "csv", tmp_path / "out")
    assert [p.stem for p in written] == [*all_streams(), "facts"]
    with open(tmp_path / "out" / "steps.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = RunReader(two_ranks).window().steps
    assert len(rows) == 71 and [float(r["loss"]) for r in rows[:40]] == steps["loss"].tolist()
    assert (rows[-1]["rank"], rows[-1]["attempt"], rows[-1]["loss"], rows[-1]["lr"]) == ("1", "2", "nan", "inf")
    with open(tmp_path / "out" / "facts.csv", newline="") as file:
        facts = list(csv.DictReader(file))
    assert len(facts) == 7 and json.loads(facts[1]["data"]) == {"n": 11} and facts[1]["line"] == "11"


def test_sqlite(two_ranks: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second replaces the first
        assert export(two_ranks, "sqlite", tmp_path / "deep" / "run.sqlite") == [tmp_path / "deep" / "run.sqlite"]
    with closing(sqlite3.connect(tmp_path / "deep" / "run.sqlite")) as database:
        assert database.execute("select count(*), max(loss) from steps where rank = 0").fetchone() == (40, 10.0)
        assert database.execute("select loss, lr from steps where attempt = 2").fetchone() == (None, float("inf"))
        assert database.execute("select hash from rows").fetchone() == (-1,)
        assert database.execute("select count(*) from layers").fetchone() == (70 * 8,)
        assert database.execute("select file, line, json_extract(data, '$.n') from facts where step = 11").fetchone() == ("train.py", 11, 11)
    assert len(list((tmp_path / "deep").iterdir())) == 1


def test_parquet(two_ranks: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    export(two_ranks, "parquet", tmp_path / "out")
    steps = pq.read_table(tmp_path / "out" / "steps.parquet").to_pydict()
    assert len(steps["step"]) == 71 and steps["loss"][:40] == RunReader(two_ranks).window().steps["loss"].tolist()
    assert pq.read_table(tmp_path / "out" / "rows.parquet").to_pydict()["hash"] == [2**64 - 1]
    assert pq.read_table(tmp_path / "out" / "facts.parquet").num_rows == 7
    assert np.dtype("f4") == pq.read_table(tmp_path / "out" / "steps.parquet").schema.field("loss").type.to_pandas_dtype()
    empty = make_run(tmp_path / "empty")
    assert len(export(empty, "parquet", tmp_path / "nothing")) == len(all_streams()) + 1


def test_export_says_what_is_wrong(two_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no format 'xls'; known: parquet, csv, sqlite"):
        export(two_ranks, "xls", tmp_path / "out")
    (tmp_path / "file").write_text("")
    for fmt in ("csv", "sqlite"):
        with pytest.raises(UsageError, match="cannot write"):
            export(two_ranks, fmt, tmp_path / "file" / "out")
    with pytest.raises(RunNotFound):
        export(tmp_path / "none", "csv", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"osler\[export\]"):
        export(two_ranks, "parquet", tmp_path / "out")
