"""Wrong calls are one line and a code; nothing is run."""

from __future__ import annotations

import sys

import pytest

from osler.cli import command, options
from osler.cli.main import dispatch
from osler.core.errors import OslerError, UsageError


@pytest.mark.parametrize(("words", "code", "line"), [
    (["run", "train2.py"], 66, "no file train2.py here. Did you mean train.py?"),
    (["run", "nowhere/train.py"], 66, "There is no folder nowhere either."),
    (["run", "--bogus", "train.py"], 64, "osler run has no option --bogus."),
    (["run", "--bugdet", "1%", "train.py"], 64, "Did you mean --budget?"),
    (["run", "--fail-on", "loud", "train.py"], 64, "invalid choice"),
    (["run", "--budget", "lots", "train.py"], 64, "write it as 2% or 0.02"),
    (["run", "--format", "json", "train.py"], 64, "stdout belongs to the script"),
    (["run", "--json", "no/such/folder.json", "train.py"], 64, "there is no folder no/such"),
    (["run", "--ignore", "grad-not-clear", "train.py"], 64, "Did you mean 'grad-not-cleared'?"),
    (["run"], 64, "nothing to run"),
    (["run", "-m"], 64, "-m wants the name of a module"),
    (["run", "no-such-program"], 127, "no program no-such-program on PATH"),
    (["train.py"], 64, "Try: osler run train.py"),
    (["rnu"], 64, "Did you mean run?"),
    (["report", "nothing"], 66, "no run matches 'nothing'"),
    (["explain", "grad-not-clear"], 64, "Did you mean 'grad-not-cleared'?"),
])
def test_one_line_and_a_code(bench, monkeypatch, words, code, line):
    bench.script("print('must not run')\n")
    monkeypatch.chdir(bench.folder)
    with pytest.raises(OslerError) as caught:
        dispatch(words)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == code


def test_no_traceback_of_ours(bench):
    done = bench.osler("run", "--bogus", "train.py")
    assert (done.returncode, done.stdout) == (64, b"")
    assert done.stderr == b"osler: osler run has no option --bogus. Try: osler run --help\n"
    assert bench.osler("--version").stdout.startswith(b"osler ")
    assert bench.osler().returncode == 64


@pytest.mark.parametrize(("words", "ours", "rest"), [
    ("train.py --json x", "", "train.py --json x"),
    ("--quiet train.py --quiet", "--quiet", "train.py --quiet"),
    ("--json f -m pkg.mod -v", "--json f", "-m pkg.mod -v"),
    ("--json=f --guard -- torchrun -n 2 t.py", "--json=f --guard", "torchrun -n 2 t.py"),
    ("--ignore a --ignore b -o out train.py -- x", "--ignore a --ignore b -o out", "train.py -- x"),
])
def test_options_after_the_script_are_the_scripts(words, ours, rest):
    parser = options.Parser("osler run")
    options.add_run_options(parser)
    assert options.split(parser, words.split()) == (ours.split(), rest.split())


def test_what_is_started(bench, monkeypatch, tmp_path):
    bench.script("", "train.py")
    bench.script("", "pack/__main__.py")
    monkeypatch.chdir(bench.folder)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    assert command.resolve(["train.py", "-x"]).words == (command.python(), "train.py", "-x")
    assert command.resolve(["-m", "pkg.mod", "a"]).words == (command.python(), "-m", "pkg.mod", "a")
    assert command.resolve(["pack"]).words == (command.python(), "pack")
    launched = command.resolve(["sh", "-c", "x", "train.py"])
    assert (launched.words, launched.script) == (("sh", "-c", "x", "train.py"), bench.folder / "train.py")
    active = tmp_path / "venv" / "bin" / "python"
    active.parent.mkdir(parents=True)
    active.symlink_to(sys.executable)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "venv"))
    assert command.python() == str(active)


def test_budget():
    assert options.fraction("2%") == options.fraction("0.02") == 0.02
    for wrong in ("0", "-1%", "200%", "x"):
        with pytest.raises(Exception, match="share of the time"):
            options.fraction(wrong)


def test_unknown_option_names_the_parser():
    parser = options.Parser("osler run")
    with pytest.raises(UsageError, match="has no option --wat"):
        parser.parse_args(["--wat"])


def test_light_until_the_script_runs(bench):
    code = ("import sys, osler.cli.main, osler.cli.supervisor, osler.store.runs, osler.store.files\n"
            "print([m for m in ('numpy', 'rich', 'torch', 'asyncio', 'typing_extensions') if m in sys.modules])\n")
    assert bench.python("-c", code).stdout == b"[]\n"
