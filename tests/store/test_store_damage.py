"""Torn files, full disks, folders that are read-only or gone, sizes over the cap: never a wrong row, never an exception."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_data import layer_rows, make_run, step_values, write_run, wrong_steps

from osler.core.facts import Fact
from osler.core.window import Window
from osler.store import writer as writer_module
from osler.store.reader import RunReader
from osler.store.writer import Writer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run", steps=200, cap_bytes=1 << 17)


@pytest.fixture(scope="module")
def full(whole: Path) -> Window:
    return RunReader(whole).window()


def check_is_prefix(window: Window, full: Window, torn: str) -> None:
    """Streams, facts and the rest are what they were, except for the end of the torn file."""
    for name, rows in full.streams.items():
        held = window.stream(name)
        if torn.startswith(f"{name}-"):
            left = set(held.tolist())
            assert held.tolist() == [r for r in rows.tolist() if r in left]
        else:
            assert np.array_equal(held, rows)
    facts = list(full.all_facts)
    assert list(window.all_facts) == (facts[:len(window.all_facts)] if torn == "facts.jsonl" else facts)
    assert window.traces == full.traces or torn.startswith("trace-")
    for path, text in window.sources.items():
        assert full.sources[path].startswith(text)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_file_cut_anywhere_reads_as_a_prefix(whole: Path, full: Window, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    files = sorted(p for p in whole.glob("rank-0000/**/*") if p.is_file())
    target = data.draw(st.sampled_from(files))
    cut = data.draw(st.one_of(st.integers(0, min(400, target.stat().st_size)), st.integers(0, target.stat().st_size)))
    copy = tmp_path_factory.mktemp("torn") / "run"
    shutil.copytree(whole, copy)
    os.truncate(copy / target.relative_to(whole), cut)
    reader = RunReader(copy)
    check_is_prefix(reader.window(), full, target.name)
    if target.name.startswith("steps-"):
        assert len(reader.window().steps) < len(full.steps) or cut == target.stat().st_size
    assert reader.pyramid("steps", "loss", 10)["max"].max() <= 50.0
    shutil.rmtree(copy)  # hundreds of copies otherwise


def test_a_cut_file_that_grows_again_is_read_on(tmp_path: Path) -> None:
    """A reader that saw half a row, half a header or half a line goes on where it stood."""
    full = RunReader(write_run(tmp_path / "run", steps=200)).window()
    for name in ("steps-0000.npy", "facts.jsonl"):
        path = tmp_path / "run" / "rank-0000" / name
        content = path.read_bytes()
        os.truncate(path, 0)
        reader = RunReader(tmp_path / "run")
        for upto in range(0, len(content) + 97, 97):
            path.write_bytes(content[:upto])
            reader.refresh()
            assert wrong_steps(reader.window().steps) == 0
    assert list(reader.window().all_facts) == list(full.all_facts) and np.array_equal(reader.window().steps, full.steps)
    assert reader.damaged == 0


def test_damaged_lines_and_files_are_skipped_and_counted(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    rank = tmp_path / "run" / "rank-0000"
    with open(rank / "facts.jsonl", "ab") as file:
        file.write(b'\x00\xff garbage\n[1]\n{"step": 3}\n{"kind": "late", "step": 9}\n{"kind": "torn')
    (rank / "trace-0000.json").write_text("{")
    (rank / "calls-0000.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(500))
    (rank / "layers-0000.npy").write_bytes(b"something else entirely")
    (rank / "foreign-0000.npy").write_bytes(b"x")
    (rank / "store.json").unlink()
    reader = RunReader(tmp_path / "run")
    assert reader.window().all_facts[-1].kind == "late" and len(reader.window().steps) == 200
    assert len(reader.window().traces) == 0 and reader.damaged == 3 + 1 + 2
    assert not reader.refresh() and reader.damaged == 6


def record(writer: Writer, steps: int = 50) -> None:
    for step in range(1, steps + 1):
        writer.row("steps", step_values(step))
        writer.rows("layers", layer_rows(step))
    writer.fact(Fact("mark", steps, 0.0))
    writer.trace({"ops": []})
    writer.source("a", "b")


def check_inert(writer: Writer, expected: str) -> None:
    assert writer.error is not None and expected in writer.error and "\n" not in writer.error
    record(writer)
    assert not writer.active and not writer.flush(0.1)
    assert not any(len(pending) for _, pending in writer._slots.values()) and not writer._events
    writer.close()
    writer.close()


@pytest.mark.parametrize("after", [0, 1, 7, 23])
def test_disk_full_stops_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    left, real = [after], os.write

    def full(fd: int, data: memoryview) -> int:
        if threading.current_thread().name == "osler-writer":
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if left[0] == 0:
                return real(fd, data[:max(1, len(data) * 2 // 3)])  # a short write that tears the row
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    for _ in range(5):
        record(writer)
        writer.flush(5)
    check_inert(writer, "No space left on device")
    rows = RunReader(tmp_path / "run").window().steps
    assert all(wrong_steps(rows[i:i + 50]) == 0 for i in range(0, len(rows), 50))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_dev_full(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    assert writer.flush(5) and writer.directory is not None
    (writer.directory / "facts.jsonl").symlink_to("/dev/full")
    record(writer)
    assert not writer.flush(5)
    check_inert(writer, "No space left on device")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = Writer(tmp_path / "file" / "run")
    writer.open()
    record(writer)
    assert not writer.flush(5)
    check_inert(writer, "Not a directory")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.chmod(0o500)
    writer = Writer(run)
    writer.open()
    record(writer)
    writer.flush(5)
    run.chmod(0o700)
    check_inert(writer, "Permission denied")


def test_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    writer = Writer(tmp_path / "run")
    writer.open()
    writer.flush(5)
    check_inert(writer, "Read-only file system")


def test_deleted_folder(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    record(writer)
    assert writer.flush(5)
    reader = RunReader(tmp_path / "run")
    assert len(reader.window().steps) == 50
    shutil.rmtree(tmp_path / "run")
    record(writer)
    assert not writer.flush(5)
    check_inert(writer, "No such file or directory")
    reader.refresh()
    assert len(reader.window().steps) == 50 and not (tmp_path / "run").exists()


def test_a_hanging_disk_bounds_memory_and_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PENDING_BYTES", 10_000)
    hang, real = threading.Event(), os.write

    def slow(fd: int, data: memoryview) -> int:
        if threading.current_thread().name == "osler-writer":
            hang.wait(20)
        return real(fd, data)

    monkeypatch.setattr(os, "write", slow)
    writer = Writer(make_run(tmp_path / "run"))
    writer.open()
    for _ in range(30):
        record(writer)
    assert not writer.flush(0.05)
    assert len(writer._slots["steps"][1]) <= 11_000 and writer.lost > 0
    writer.close(timeout=0.1)
    hang.set()
    assert not writer.active


def test_the_cap_drops_old_fine_segments_and_says_so(tmp_path: Path) -> None:
    cap = 1 << 20
    writer = Writer(make_run(tmp_path / "run"), cap_bytes=cap)
    writer.open()
    reader = RunReader(tmp_path / "run")
    for step in range(1, 3001):
        writer.row("steps", step_values(step))
        writer.rows("layers", layer_rows(step, 32))
        if step % 200 == 0:
            assert writer.flush(5)
            reader.refresh()
            layers = reader.window().layers
            assert layers["step"][-1] == step and (np.diff(layers["step"]) >= 0).all()
    writer.close()
    size = sum(p.stat().st_size for p in (tmp_path / "run" / "rank-0000").iterdir())
    assert size < cap * 1.05
    reader.refresh()
    live, later = reader.window(), RunReader(tmp_path / "run").window()
    assert wrong_steps(later.steps) == 0 and len(later.steps) == 3000  # the coarse streams are whole
    assert 0 < len(later.layers) < 3000 * 32 and later.layers["step"][-1] == 3000
    assert np.array_equal(live.layers, later.layers)
    said = [f["text"] for f in later.facts("self")]
    assert all(f["what"] == "budget" for f in later.facts("self")) and "1 MiB reached: 1 old segment(s)" in said[0]
    assert 1 < len(said) < 10  # at doubling counts


def test_steps_go_last_and_facts_never(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"), cap_bytes=1 << 17)
    writer.open()
    for step in range(1, 20_001):
        writer.row("steps", step_values(step))
        if step % 500 == 0:
            writer.fact(Fact("mark", step, 0.0))
            writer.source(f"{step}.py", "x" * 5000)
            assert writer.flush(5)
    writer.close()
    reader = RunReader(tmp_path / "run")
    window = reader.window()
    assert len(window.facts("mark")) == 40 and 0 < len(window.sources) < 40
    assert 0 < len(window.steps) < 20_000 and wrong_steps(window.steps, int(window.steps["step"][0])) == 0
    assert reader.pyramid("steps", "loss", 100)["count"].sum() == 20_000
    assert json.loads((tmp_path / "run" / "rank-0000" / "store.json").read_text())["schema"] == 1
