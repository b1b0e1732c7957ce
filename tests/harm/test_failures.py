"""When something of ours fails, training goes on or ends exactly as without us."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from side_by_side import ROOT, WATCH, Outcome, differences, environment, facts, run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, limits and mounts of POSIX")
WATCHER = ROOT / "src" / "osler" / "watch"
TAPS = sorted({name for file in WATCHER.rglob("*.py") for name in re.findall(r'\.(?:armed|wrap)\(\s*"([\w-]+)"', file.read_text())})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    from side_by_side import copy_scripts

    folder = copy_scripts(tmp_path_factory.mktemp("alone") / "scripts")
    return run([sys.executable, "cnn_batchnorm_dropout.py"], folder, environment(folder / "runs"))


def watched(scripts: Path, runs: Path | str, **more: object) -> Outcome:
    env = {**environment(runs), **more.pop("env", {})}  # type: ignore[dict-item]
    return run([*WATCH, "cnn_batchnorm_dropout.py"], scripts, env, **more)  # type: ignore[arg-type]


def test_there_are_taps() -> None:
    assert len(TAPS) >= 8, f"the pattern that finds the taps' names found only {TAPS}"


@pytest.mark.parametrize("tap", [pytest.param(t, marks=[] if t in {"criterion", "step"} else [pytest.mark.slow]) for t in TAPS])
def test_a_tap_that_raises(tap: str, alone: Outcome, scripts: Path, runs: Path) -> None:
    broken = watched(scripts, runs, env={"OSLER_TEST_RAISE": tap})
    assert not differences(alone, broken)
    if tap in {"criterion", "step", "backward", "module"}:
        assert any("provoked" in json.dumps(f) for f in facts(runs)), "the failure is not on record"


@pytest.mark.parametrize("place", ["/dev/null/runs", "/proc/runs"])
def test_runs_cannot_be_written(place: str, alone: Outcome, scripts: Path) -> None:
    outcome = run([*WATCH[:-1], "cnn_batchnorm_dropout.py"], scripts, environment(place))
    assert not differences(alone, outcome)
    assert outcome.our_stderr, "one line should say that nothing is recorded"


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_write_permission(alone: Outcome, scripts: Path) -> None:
    scripts.chmod(0o555)
    try:
        outcome = run([*WATCH, "cnn_batchnorm_dropout.py"], scripts, {k: v for k, v in environment("").items() if k != "OSLER_DIR"})
    finally:
        scripts.chmod(0o755)
    assert not differences(alone, outcome)


@pytest.mark.parametrize("limit", [200, 16_384, pytest.param(4000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.slow)])
def test_files_may_not_grow(limit: int, alone: Outcome, scripts: Path, runs: Path) -> None:
    """As on a full disk: every write past ``limit`` bytes of a file fails."""
    outcome = watched(scripts, runs, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert not differences(alone, outcome)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk],
                                                   capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("used", [0, 24, 32])
def test_disk_full(used: int, tiny_disk: Path, alone: Outcome, scripts: Path) -> None:
    with (tiny_disk / "filler").open("wb") as file:
        try:
            file.write(b"x" * used * 1024)
        except OSError:
            pass
    assert not differences(alone, watched(scripts, tiny_disk / "runs"))


def test_read_only_mount(tiny_disk: Path, alone: Outcome, scripts: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    assert not differences(alone, watched(scripts, tiny_disk / "runs"))


def test_run_folder_removed_midway(scripts: Path, runs: Path) -> None:
    done = threading.Event()

    def remove() -> None:
        while not done.wait(0.05):
            if len(list(runs.rglob("facts.jsonl"))) and (scripts / "out").exists() and (scripts / "out").stat().st_size > 200:
                shutil.rmtree(runs, ignore_errors=True)

    thread = threading.Thread(target=remove)
    plain = run([sys.executable, "_paced.py", "plain"], scripts, environment(runs))
    thread.start()
    try:
        outcome = run([*WATCH, "_paced.py", "out"], scripts, environment(runs))
    finally:
        done.set()
        thread.join()
    assert not differences(plain, outcome)
    assert (scripts / "out").read_text() == (scripts / "plain").read_text()


def started(scripts: Path, runs: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """``osler run`` in a session of its own, once its script is at the third step."""
    process = subprocess.Popen([*WATCH, "_paced.py", "out", *arguments], cwd=scripts, env=environment(runs),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    reached(scripts / "out", 3)
    return process


def reached(file: Path, lines: int, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if file.exists() and len(file.read_text().splitlines()) >= lines:
            return
        time.sleep(0.02)
    pytest.fail(f"{file.name} never had {lines} lines")


def test_supervisor_killed(scripts: Path, runs: Path) -> None:
    plain = run([sys.executable, "_paced.py", "plain"], scripts, environment(runs))
    process = started(scripts, runs)
    process.kill()
    stdout, _ = process.communicate(timeout=60)  # the pipe closes when the training ends
    assert (scripts / "out").read_text() == (scripts / "plain").read_text()
    assert stdout == plain.stdout


@pytest.mark.parametrize("whole_group", [True, False], ids=["ctrl-c", "supervisor-only"])
@pytest.mark.parametrize("arguments", [[], ["catch"]], ids=["dies", "saves"])
def test_interrupt(whole_group: bool, arguments: list[str], scripts: Path, runs: Path) -> None:
    process = started(scripts, runs, *arguments)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    _stdout, stderr = process.communicate(timeout=60)
    written = (scripts / "out").read_text().splitlines()
    if arguments:
        assert process.returncode == 8 and written[-2:] == ["saved", "done"]
        assert b"Traceback" not in stderr
    else:
        assert process.returncode in {-signal.SIGINT, 130}
        assert "done" not in written
        assert stderr.count(b"Traceback") == 1 and stderr.count(b"KeyboardInterrupt") == 1
        assert b"osler/" not in stderr and b"sitecustomize" not in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], ids=lambda n: n.name)
def test_signals_are_passed_on(number: signal.Signals, scripts: Path, runs: Path) -> None:
    process = started(scripts, runs)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in {-number, 128 + number}
    assert "done" not in (scripts / "out").read_text()


def test_killed_training_is_reported(scripts: Path, runs: Path) -> None:
    out = scripts / "findings.json"
    command = [*WATCH[:-1], "--json", out, "exits.py", "kill"]
    outcome = run(command, scripts, environment(runs))
    assert outcome.as_shell == 137
    assert "SIGKILL" in outcome.stderr.decode() or "killed" in outcome.stderr.decode()
    assert "findings" in json.loads(out.read_text())


def test_rows_before_a_kill_are_kept(scripts: Path, runs: Path) -> None:
    """What happened more than half a second before ``kill -9`` is on disk."""
    from osler.store.reader import RunReader

    process = started(scripts, runs)
    reached(scripts / "out", 30)
    child = next(f for f in facts(runs) if f["kind"] == "attached")["data"]["pid"]
    before = len((scripts / "out").read_text().splitlines())
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)
    reader = RunReader(next(runs.glob("*/run.json")).parent)
    reader.refresh()
    kept = int(reader.window().steps["step"].max())
    assert kept >= before - 0.5 / 0.05 - 2, f"{kept} steps on disk, {before} were done"


def test_terminal_is_passed_through(scripts: Path, runs: Path) -> None:
    (scripts / "asks.py").write_text("import sys, os, torch\n"
                                     "print([os.isatty(i) for i in range(3)], os.get_terminal_size(), input('name? '), flush=True)\n")

    def typed(command: list[str]) -> bytes:
        master, slave = pty.openpty()
        process = subprocess.Popen(command, cwd=scripts, env=environment(runs), stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        os.write(master, b"Osler\n")
        seen = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
        os.close(master)
        assert process.wait(60) == 0
        return b"\n".join(line for line in seen.splitlines() if not line.startswith(b"osler"))

    assert typed([sys.executable, "asks.py"]) == typed([*WATCH, "asks.py"])


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_closed_streams(closed: str, alone: Outcome, scripts: Path, runs: Path) -> None:
    def shell(command: list[str]) -> Outcome:
        return run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], scripts, environment(runs))

    plain = shell([sys.executable, "cnn_batchnorm_dropout.py"])
    assert not differences(plain, shell([*WATCH, "cnn_batchnorm_dropout.py"]))
