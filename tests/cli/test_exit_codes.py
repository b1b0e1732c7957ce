"""How the script ends is how ``osler run`` ends."""

from __future__ import annotations

import json
import signal
import sys

import pytest


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "import os; os._exit(7)", "1 / 0", "raise SystemExit('bye')"])
def test_code_passes_through(bench, ending):
    bench.script(f"print('hello')\n{ending}\n")
    watched = bench.same("train.py")
    assert json.loads((bench.run / "end.json").read_text())["code"] == watched.returncode


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGTERM", "SIGINT"])
def test_death_by_signal_passes_through(bench, name):
    bench.script(f"import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('so long', flush=True)\nos.kill(os.getpid(), signal.{name})\n")
    watched = bench.same("train.py")
    assert watched.returncode == -getattr(signal, name)
    end = json.loads((bench.run / "end.json").read_text())
    assert (end["code"], end["signal"], end["out_of_memory"]) == (None, name, False)


def test_shell_sees_the_same_status(bench):
    bench.script("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    line = f"{sys.executable} -m osler run train.py; echo $?"
    assert bench.call(["sh", "-c", line]).stdout == b"139\n"


def test_killed_without_a_reason_names_the_usual_one(bench):
    bench.script("import os\nos.kill(os.getpid(), 9)\n")
    assert b"often the out-of-memory killer" in bench.osler("run", "train.py").stderr


def test_script_without_torch_is_one_line_and_valid_json(bench):
    bench.script("print('no torch')\n")
    done = bench.osler("run", "--json", "out.json", "train.py")
    assert done.stderr == b"osler: torch was never imported by train.py: nothing to watch\n"
    for path in (bench.folder / "out.json", bench.run / "findings.json"):
        found = json.loads(path.read_text())
        assert found["findings"] == []
        assert "torch was never imported" in found["not_checked"][0]["why"]


def test_isolated_python_is_told_apart(bench):
    bench.script("import torch\n")
    done = bench.osler("run", "--", sys.executable, "-I", "-c", "pass")
    assert b"no Python that osler can watch" in done.stderr


def test_quiet_says_nothing(bench):
    bench.script("print(1)\n")
    assert bench.osler("run", "--quiet", "train.py").stderr == b""


def test_run_folder_that_cannot_be_made_does_not_stop_the_script(bench):
    bench.script("import os\nprint('fine', os.environ.get('OSLER_RUN'))\nraise SystemExit(5)\n")
    (bench.folder / "file").write_text("")
    done = bench.osler("run", "--dir", "file/below", "train.py")
    assert (done.stdout, done.returncode) == (b"fine None\n", 5)
    assert done.stderr.count(b"\n") == 1 and b"runs unwatched" in done.stderr


def test_closed_stderr_does_not_matter(bench):
    bench.script("print('fine')\nraise SystemExit(4)\n")
    done = bench.call(["sh", "-c", f"{sys.executable} -m osler run train.py 2>&-"])
    assert (done.stdout, done.returncode) == (b"fine\n", 4)
