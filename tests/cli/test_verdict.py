"""What osler says while a run lasts and when it is over, and what it writes. The faults are made up (``fake_osler``)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from osler.cli import follow
from osler.core.finding import Finding, Where

DRIVER = str(Path(__file__).with_name("fake_osler.py"))
TRAINING = """
import os, sys, time
from pathlib import Path
from osler.core.facts import Fact, Location
from osler.store.writer import Writer
def record(rank, *causes, severity="harmful", certainty="certain"):
    writer = Writer(Path(os.environ["OSLER_RUN"]), rank=rank)
    writer.open()
    writer.fact(Fact("attached", 0, 0.0, None, {"pid": os.getpid(), "main": __file__}))
    for cause in causes:
        writer.fact(Fact("fake", 1, 0.1, Location("train.py", 7), {"cause": cause, "severity": severity, "certainty": certainty, "title": f"{cause} is seen"}))
    writer.flush()
    return writer
print("training", flush=True)
"""


@pytest.fixture
def fake(bench):
    del bench.env["PYTHONPATH"]

    def run(text, *words, **env):
        bench.script(TRAINING + text)
        return bench.call([sys.executable, DRIVER, "run", *words, "train.py"], env=env)

    return run


def test_said_at_once_and_again_at_the_end(bench, fake):
    done = fake("record(0, 'grad-not-cleared')\nfor _ in range(100):\n    time.sleep(0.1)\n    if os.path.exists('said'): break\n",
                "--json", "a.json", "--output", "b.sarif")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 0 and done.stdout == b"training\n"
    assert lines[0].startswith("osler: train.py:7: grad-not-cleared is seen") and "[grad-not-cleared]" in lines[0]
    assert sum(line.startswith("osler: train.py:7") for line in lines) == 1
    assert any("report.html" in line for line in lines)
    found = json.loads((bench.folder / "a.json").read_text())
    assert [f["cause"] for f in found["findings"]] == ["grad-not-cleared"]
    assert found == json.loads((bench.run / "findings.json").read_text())
    assert json.loads((bench.folder / "b.sarif").read_text())["version"] == "2.1.0"
    assert (bench.run / "report.html").read_text().lower().startswith("<!doctype html>")


def test_fail_on(fake):
    quick = "record(0, 'grad-not-cleared')\nraise SystemExit(3)\n"
    assert fake(quick, "--fail-on", "harmful").returncode == 1
    assert fake(quick, "--fail-on", "fatal").returncode == 3
    assert fake(quick).returncode == 3


def test_stop_on(bench, fake):
    began = time.monotonic()
    done = fake("record(0, 'loss-diverged', severity='fatal')\ntime.sleep(60)\n", "--stop-on", "fatal", "--no-html")
    assert time.monotonic() - began < 40
    assert b"stopping the run because of loss-diverged (--stop-on fatal)" in done.stderr
    assert done.returncode == -2 and not (bench.run / "report.html").exists()


def test_stop_reaches_the_trainer_behind_a_shell(bench):
    del bench.env["PYTHONPATH"]
    bench.script(TRAINING + "record(0, 'loss-diverged', severity='fatal')\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved')\n")
    done = bench.call([sys.executable, DRIVER, "run", "--stop-on", "fatal", "--", "sh", "-c", f"{sys.executable} train.py; exit 0"])
    assert b"saved" in done.stdout


def test_quiet_still_writes(bench, fake):
    done = fake("record(0, 'grad-not-cleared')\n", "--quiet")
    assert done.stderr == b"" and (bench.run / "findings.json").exists()


def test_ranks_and_attempts_are_all_judged(bench, fake):
    fake("record(0, 'grad-not-cleared').close()\nrecord(1, 'grad-not-cleared', 'loss-sign').close()\n"
         "record(0, 'lr-too-high').close()\n", "--quiet")
    found = {f["cause"]: f for f in json.loads((bench.run / "findings.json").read_text())["findings"]}
    assert set(found) == {"grad-not-cleared", "loss-sign", "lr-too-high"}
    assert found["grad-not-cleared"]["evidence"][-1]["text"] == "seen on all 2 ranks"
    assert found["loss-sign"]["evidence"][-1]["text"] == "seen on rank 1 of 2"
    assert found["loss-sign"]["where"]["rank"] == 1


@pytest.mark.parametrize("when", ["live", "always"])
def test_broken_engine_never_costs_the_exit_code(bench, fake, when):
    done = fake("record(0, 'grad-not-cleared')\ntime.sleep(1.5)\nraise SystemExit(3)\n", FAKE_CRASH=when)
    assert done.returncode == 3 and done.stdout == b"training\n"
    assert b"Traceback" not in done.stderr and b"osler.log" in done.stderr
    assert "the engine broke" in (bench.run / "osler.log").read_text()
    found = json.loads((bench.run / "findings.json").read_text())["findings"]
    assert len(found) == (1 if when == "live" else 0)


def test_file_that_cannot_be_written(bench, fake):
    (bench.folder / "out.json").mkdir()
    done = fake("record(0)\nraise SystemExit(3)\n", "--json", "out.json")
    assert done.returncode == 3 and b"out.json could not be written" in done.stderr


def test_verbs_over_the_run(bench, fake, monkeypatch):
    fake("record(0, 'grad-not-cleared')\n", "--name", "first", "--quiet")
    name = bench.run.name
    listed = bench.osler("runs").stdout.decode()
    assert name in listed and "1 harmful" in listed and "exit 0" in listed
    row = json.loads(bench.osler("runs", "--json").stdout)
    assert (row["id"], row["causes"], row["alive"]) == (name, ["grad-not-cleared"], False)
    shown = bench.call([sys.executable, DRIVER, "report", "latest", "--json", "r.json", "--html", "r.html"])
    assert shown.returncode == 1 and json.loads((bench.folder / "r.json").read_text())["findings"]
    text = bench.call([sys.executable, DRIVER, "report", name[:20]])
    assert b"Change it" in text.stdout and text.stderr == b""
    lines = bench.call([sys.executable, DRIVER, "report", "--format", "jsonl"]).stdout.splitlines()
    assert json.loads(lines[0])["type"] == "run"
    assert bench.osler("export", "--to", "csv", "-o", "tables").returncode == 0
    assert (bench.folder / "tables" / "facts.csv").exists()


def test_sidecar_ends_with_the_process(bench):
    del bench.env["PYTHONPATH"]
    run = bench.folder / "run"
    run.mkdir()
    (run / "run.json").write_text('{"schema": 1, "id": "run", "name": "notebook", "command": ["notebook"]}')
    bench.script(TRAINING + "writer = record(0, 'grad-not-cleared')\ntime.sleep(1.5)\n"
                 "writer.fact(Fact('exit', 5, 2.0, None, {'steps': 5, 'clean': True}))\nwriter.close()\ntime.sleep(0.5)\n")
    training = subprocess.Popen([sys.executable, "train.py"], cwd=bench.folder, env={**bench.env, "OSLER_RUN": str(run)},
                                stdout=subprocess.DEVNULL)
    done = bench.call([sys.executable, DRIVER, "sidecar", "run", str(training.pid)])
    assert training.wait(30) == 0 and done.returncode == 0
    assert b"grad-not-cleared is seen" in done.stderr and done.stdout == b""
    assert json.loads((run / "end.json").read_text())["code"] == 0
    assert json.loads((run / "findings.json").read_text())["findings"]


def test_sidecar_knows_the_dead(bench):
    from osler import sidecar

    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    assert sidecar.alive(os.getpid())
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert not sidecar.alive(gone.pid)  # a zombie
    gone.wait()
    assert not sidecar.alive(gone.pid)


def finding(certainty):
    return Finding("lr-too-high", certainty, "harmful", "t", "f", Where("a.py", 1))


def test_a_statistic_is_said_when_it_stays(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text("{}")
    follower = follow.Follower(tmp_path, {}, tmp_path, print)

    class Verdict:
        findings = (finding("measured"),)

    follower.verdict = Verdict()
    follower.windows = {(0, 1): None}
    assert [len(follower._news()) for _ in range(4)] == [0, 1, 0, 0]
    Verdict.findings = (finding("certain").replace(cause="grad-not-cleared"),)
    assert len(follower._news()) == 1


def test_looks_are_spaced_by_their_cost(tmp_path, monkeypatch):
    (tmp_path / "rank-0000").mkdir()
    facts = tmp_path / "rank-0000" / "facts.jsonl"
    follower, looks, clock = follow.Follower(tmp_path, {}, tmp_path, print), [], [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])

    def look():
        looks.append(round(clock[0], 1))
        clock[0] += 0.3

    monkeypatch.setattr(follower, "_look", look)
    monkeypatch.setattr(follower, "_news", list)
    steps = tmp_path / "rank-0000" / "steps-0000.npy"
    while clock[0] < 20:
        steps.write_bytes(b"x" * int(clock[0] * 10 + 1))
        follower.tick()
        clock[0] += 0.25
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert min(gaps) > 6.0  # 20 times 0.3 s
    before = len(looks)
    facts.write_text("news")
    follower._ended = clock[0] - 2.1
    follower.tick()
    assert len(looks) == before + 1
