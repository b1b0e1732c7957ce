"""The writer inside real processes: killed, forked, at exit, and read while it writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from store_data import make_run, step_values, wrong_steps

from osler.core.facts import Fact
from osler.store.reader import RunReader
from osler.store.writer import Writer

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and fork")
HEAD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from store_data import step_values
from osler.core.facts import Fact
from osler.store.writer import Writer
writer = Writer(Path(sys.argv[1]))
"""


def start(code: str, run: Path, *options: str) -> subprocess.Popen[str]:
    script = HEAD.format(here=str(Path(__file__).parent)) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, *options, "-c", script, str(run)], stdout=subprocess.PIPE, text=True)


@posix
def test_kill_9_loses_at_most_half_a_second(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    process = start("""
        writer.open()
        step = 0
        while True:
            step += 1
            values = list(step_values(step)); values[1] = time.time()
            writer.row("steps", values)
            if step % 100 == 0:
                writer.fact(Fact("mark", step, 0.0))
            time.sleep(0.0005)
    """, run)
    while not (run / "rank-0000" / "steps-0000.npy").exists():
        time.sleep(0.02)
    time.sleep(0.9)
    killed = time.time()
    process.kill()
    process.communicate()
    reader = RunReader(run)
    rows = reader.window().steps
    assert len(rows) > 100 and (np.diff(rows["step"]) == 1).all() and rows["step"][0] == 1
    assert killed - rows["t"][-1] <= 0.5
    assert len(reader.window().facts("mark")) >= len(rows) // 100
    loaded = np.load(run / "rank-0000" / "steps-0000.npy")
    assert np.array_equal(loaded, rows[:len(loaded)]) and killed - loaded["t"][-1] <= 0.5


@posix
def test_a_forked_child_is_inert_and_repeats_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    process = start("""
        import threading
        # This hook runs after the writer's own. Python 3.12 warns of a fork when there is a second thread.
        threads = []
        os.register_at_fork(before=lambda: threads.append(threading.active_count()))
        writer.open()
        for step in range(1, 11):
            writer.row("steps", step_values(step))
        children = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                assert not writer.active
                for step in range(90, 100):
                    writer.row("steps", step_values(step))
                writer.fact(Fact("child", 0, 0.0))
                writer.open(); writer.flush(); writer.close()
                sys.exit(7)
            children.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for step in range(11, 21):
            writer.row("steps", step_values(step))
        time.sleep(0.6)  # the thread is back after the forks
        print(children, writer.active, *threads, flush=True)
        os.kill(os.getpid(), 9)
    """, run, "-W", "error")
    out, _ = process.communicate(timeout=20)
    assert out.split() == ["[7,", "7,", "7]", "True", "1", "1", "1"]
    window = RunReader(run).window()
    assert len(window.steps) == 20 and wrong_steps(window.steps) == 0 and not window.facts("child")
    assert RunReader(run).attempts() == 1


@posix
def test_a_child_of_an_unopened_writer_is_inert(tmp_path: Path) -> None:
    process = start("""
        writer.row("steps", step_values(1))
        pid = os.fork()
        writer.open()
        if pid:
            os.waitpid(pid, 0)
    """, make_run(tmp_path / "run"))
    process.communicate(timeout=20)
    assert len(RunReader(tmp_path / "run").window().steps) == 1 and RunReader(tmp_path / "run").attempts() == 1


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0", "late()"])
def test_an_orderly_exit_loses_nothing(tmp_path: Path, ending: str) -> None:
    process = start(f"""
        import atexit
        sys.stderr = open(os.devnull, "w")
        def late():
            atexit.register(lambda: (writer.fact(Fact("exit", 3, 0.0)), None))
        writer.open()
        late()
        for step in range(1, 4):
            writer.row("steps", step_values(step))
        {ending}
    """, make_run(tmp_path / "run"))
    process.communicate(timeout=20)
    window = RunReader(tmp_path / "run").window()
    assert len(window.steps) == 3 and window.last("exit") is not None


def test_opened_in_an_exit_handler(tmp_path: Path) -> None:
    """An import-only script is recorded at exit, when no thread can be started any more (Python 3.12)."""
    process = start("""
        import atexit, threading
        def end():
            def no_thread(self): raise RuntimeError("can't create new thread at interpreter shutdown")
            threading.Thread.start = no_thread
            writer.fact(Fact("import-only", 0, 0.0)); writer.open(); writer.close()
        atexit.register(end)
    """, make_run(tmp_path / "run"))
    process.communicate(timeout=20)
    assert RunReader(tmp_path / "run").window().last("import-only") is not None


@posix
def test_the_thread_takes_no_signal_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # its threads would take the signal
    process = start("""
        import signal
        writer.open()
        time.sleep(0.3)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        print(signal.sigwait({signal.SIGUSR1}).name)
    """, make_run(tmp_path / "run"))
    out, _ = process.communicate(timeout=20)
    assert out.strip() == "SIGUSR1" and process.returncode == 0


@posix
def test_flush_from_a_signal_handler_does_not_deadlock(tmp_path: Path) -> None:
    writer = Writer(make_run(tmp_path / "run"), flush_seconds=0.01)
    writer.open()
    calls = []
    previous = signal.signal(signal.SIGALRM, lambda *_: calls.append(writer.flush(1)))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        end, step = time.monotonic() + 0.5, 0
        while time.monotonic() < end:
            step += 1
            writer.row("steps", step_values(step))
            if step % 1000 == 0:
                writer.flush(1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    writer.close()
    assert all(calls) and len(calls) > 5
    assert wrong_steps(RunReader(tmp_path / "run").window().steps) == 0


def test_a_reader_beside_the_writer_never_sees_a_wrong_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    writer = Writer(run, flush_seconds=0.002, cap_bytes=1 << 21)
    writer.open()
    done, total = threading.Event(), 30_000

    def work() -> None:
        for step in range(1, total + 1):
            if step % 50 == 1:
                writer.fact(Fact("block", step, 0.0))
            writer.row("steps", step_values(step))
            if step % 500 == 0:
                time.sleep(0.001)
        writer.close(10)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    follower, looks = RunReader(run), 0
    while not done.is_set() or looks < 3:
        follower.refresh()
        for reader in (follower, RunReader(run)) if looks % 4 == 0 else (follower,):
            window = reader.window()
            rows = window.steps[-2000:]
            if len(rows):
                assert wrong_steps(rows, len(window.steps) - len(rows) + 1) == 0
                # No row is seen without the facts recorded before it.
                assert len(window.facts("block")) >= (len(window.steps) + 49) // 50
            assert reader.damaged == 0
        for segment in (run / "rank-0000").glob("steps-*.npy"):
            if looks % 10 == 0 and segment.stat().st_size > 1000:
                np.load(segment)
        bands = follower.pyramid("steps", "loss", 64)
        assert bands["count"].sum() >= len(follower.window().steps)
        looks += 1
    thread.join()
    follower.refresh()
    assert len(follower.window().steps) == total and wrong_steps(follower.window().steps) == 0
