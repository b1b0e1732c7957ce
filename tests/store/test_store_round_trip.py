"""What is written is read: rows, facts, traces, sources, the run itself; incrementally and by plain numpy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_data import layer_rows, make_run, step_values, write_run, wrong_steps

from osler.core.errors import RunNotFound, RunUnreadable
from osler.core.facts import Fact, Location
from osler.core.signals import STEPS, STREAMS
from osler.core.window import End
from osler.store.codec import Codec
from osler.store.reader import RunReader
from osler.store.tail import adapt
from osler.store.writer import Writer, write_json


def test_everything_comes_back(tmp_path: Path) -> None:
    reader = RunReader(write_run(tmp_path / "run"))
    window = reader.window()
    assert reader.ranks() == [0] and reader.damaged == 0
    assert len(window.steps) == 300 and wrong_steps(window.steps) == 0
    assert len(window.layers) == 2400 and np.array_equal(window.layers[8:16], layer_rows(2))
    assert [f["n"] for f in window.facts("mark")] == list(range(1, 301, 10))
    assert window.facts("mark")[1] == Fact("mark", 11, 5.5, Location("train.py", 11, "main"), {"n": 11})
    assert window.traces[0].ops[0].name == "relu"
    assert window.line("/home/me/train.py", 2) == "loss.backward()"
    assert window.end == End(0, None, 1.5) and window.final


def test_numpy_alone_can_load_a_segment(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = np.load(run / "rank-0000" / "steps-0000.npy")
    assert rows.dtype == STEPS.dtype and wrong_steps(rows) == 0 and len(rows) == 300
    assert len(np.load(run / "rank-0000" / "steps-0000.npy", mmap_mode="r")) == 300
    assert set(np.load(run / "rank-0000" / "steps.pyramid-1-0000.npy").dtype.names) > {"count", "loss_min", "lr_inf"}


def test_rows_fill_segments_of_equal_size(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"), cap_bytes=1 << 18)
    writer.open()
    array = np.array([step_values(s) for s in range(1, 1001)], STEPS.dtype)
    writer.rows("steps", array)
    writer.close()
    segments = sorted((tmp_path / "run" / "rank-0000").glob("steps-*.npy"))
    sizes = [len(np.load(s)) for s in segments]
    assert len(segments) > 3 and len(set(sizes[:-1])) == 1 and sum(sizes) == 1000
    assert wrong_steps(RunReader(tmp_path / "run").window().steps) == 0


def test_refresh_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    reader = RunReader(tmp_path / "run")
    assert len(reader.window().steps) == 0
    earlier = []
    for upto in (10, 20, 400):
        for step in range(upto - 9, upto + 1):
            writer.row("steps", step_values(step))
        writer.flush()
        assert reader.refresh()
        earlier.append(reader.window().steps)
        assert not reader.refresh()
    writer.close()
    assert [len(rows) for rows in earlier] == [10, 20, 30]
    assert wrong_steps(earlier[0]) == 0 and not earlier[0].flags.writeable  # a window handed out never changes


def test_recorded_before_open_is_kept(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"))
    writer.row("steps", step_values(1))
    writer.fact(Fact("seed", 0, 0.1))
    assert writer.active and not (tmp_path / "run" / "rank-0000").exists()
    writer.open()
    writer.open()
    writer.close()
    writer.close()
    writer.row("steps", step_values(2))
    assert not writer.active and not writer.flush()
    window = RunReader(tmp_path / "run").window()
    assert len(window.steps) == 1 and len(window.all_facts) == 1


def test_a_second_process_of_a_rank_gets_its_own_folder(tmp_path: Path) -> None:
    for steps in (3, 5):
        write_run(tmp_path / "run", steps=steps)
    write_run(tmp_path / "run", steps=7, rank=12)
    reader = RunReader(tmp_path / "run")
    assert reader.ranks() == [0, 12] and reader.attempts(0) == 2 and reader.attempts(12) == 1
    assert len(reader.window().steps) == 5 and len(reader.window(0, attempt=1).steps) == 3
    assert len(reader.window(12).steps) == 7 and reader.window(12).rank == 12
    assert len(reader.window(4).steps) == 0


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-2**70, 2**70)), min_size=10, max_size=10))
def test_any_ten_numbers_are_a_row(values: list[float | None]) -> None:
    codec = Codec(STEPS)
    row = np.frombuffer(codec.coerce(values), STEPS.dtype)[0]
    for column, value in zip(STEPS.columns, values, strict=True):
        kind, read = np.dtype(column.dtype), row[column.name]
        if kind.kind != "f":
            assert value in (None, read) or value != value or abs(value) > 2**14 or value < 0 or int(value) == read
        elif value is None or value != value:
            assert math.isnan(read)
        else:
            assert math.isfinite(read) == math.isfinite(value)  # large is not the same as infinite


def test_packed_rows_have_the_numpy_layout() -> None:
    for stream in STREAMS.values():
        codec = Codec(stream)
        values = tuple(range(1, len(stream.columns) + 1))
        assert codec.itemsize == codec.dtype.itemsize
        assert np.frombuffer(codec.pack(*values), codec.dtype)[0].tolist() == values


def test_malformed_calls_are_counted_and_said_once(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    for _ in range(3):
        writer.row("steps", (1, 2))
    writer.row("nonsense", (1,))
    writer.rows("steps", np.zeros(2, "f4"))
    writer.rows("nonsense", np.zeros(2, "f4"))
    circular: dict[str, object] = {}
    circular["self"] = circular
    writer.fact(Fact("odd", 0, 0.0, data=circular))
    writer.trace({"ops": [circular]})
    writer.trace({})
    writer.fact(Fact("numpy", 0, 0.0, data={"a": np.float32(0.5), "b": np.arange(2), "c": {2, 1}, "d": Path("x")}))
    writer.row("steps", step_values(1))
    writer.close()
    window = RunReader(tmp_path / "run").window()
    said = [f["text"] for f in window.facts("self")]
    assert writer.lost == 8 and len(said) == 6 and "10 values, got 2" in said[0]
    assert window.last("numpy").data == {"a": 0.5, "b": [0, 1], "c": [1, 2], "d": "x"}  # type: ignore[union-attr]
    assert len(window.steps) == 1


def test_rows_of_another_schema_go_by_name() -> None:
    old = np.array([(7, 0.5)], [("step", "<i4"), ("loss", "<f8")])
    row = adapt(old, STEPS.dtype)[0]
    assert row["step"] == 7 and row["loss"] == 0.5 and math.isnan(row["lr"]) and row["optimizer"] == -1


def test_what_is_no_run_is_said_in_one_line(tmp_path: Path) -> None:
    make_run(tmp_path / "2026-11-30-131500-train-a1b2")
    with pytest.raises(RunNotFound, match=r"no run.json in .*; newest runs: 2026-11-30-131500-train-a1b2. Try: osler runs"):
        RunReader(tmp_path / "nothing")
    make_run(tmp_path / "new", schema=99)
    with pytest.raises(RunUnreadable, match="schema 99"):
        RunReader(tmp_path / "new")
    for text in ("{", "[]"):
        (tmp_path / "new" / "run.json").write_text(text)
        with pytest.raises(RunUnreadable, match="damaged"):
            RunReader(tmp_path / "new")


def test_the_supervisor_may_rewrite_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    reader = RunReader(run)
    assert reader.window().run["schema"] == 1 and reader.window().end is None
    write_json(run / "run.json", {"schema": 1, "pid": 12345})
    write_json(run / "end.json", {"code": None, "signal": "SIGKILL", "out_of_memory": True})
    assert reader.refresh()
    assert reader.window().run["pid"] == 12345 and reader.window().end == End(None, "SIGKILL", None, True)
    assert sorted(p.name for p in run.iterdir()) == ["end.json", "run.json"]


def test_a_source_index_cannot_lead_outside(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (tmp_path / "secret").write_text("x")
    with open(run / "rank-0000" / "sources.jsonl", "a") as file:
        file.write(json.dumps({"path": "a", "file": "../../secret"}) + "\n")
        file.write(json.dumps({"path": "b", "file": str(tmp_path / "secret")}) + "\n")
    reader = RunReader(run)
    assert list(reader.window().sources) == ["/home/me/train.py"] and reader.damaged == 2
