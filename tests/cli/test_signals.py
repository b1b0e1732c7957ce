"""Ctrl-C, job control and ``kill`` reach the script exactly as without osler: once."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

COUNTER = """
import os, signal, sys, time
seen = []
def note(number, frame):
    seen.append(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
print("ready", os.getpid(), flush=True)
end = time.monotonic() + 30
while not seen and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.4)
print("seen", [signal.Signals(n).name for n in seen], flush=True)
"""


def start(bench, text=COUNTER, group=True, **more):
    bench.script(text)
    return subprocess.Popen([sys.executable, "-m", "osler", "run", "train.py"], cwd=bench.folder, env=bench.env,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=group, text=True, **more)


def until_ready(process) -> int:
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    return int(pid)


@pytest.mark.parametrize(("name", "to"), [("SIGINT", "supervisor"), ("SIGINT", "group"), ("SIGTERM", "group"), ("SIGUSR1", "supervisor")])
def test_each_signal_arrives_once(bench, name, to):
    process = start(bench)
    until_ready(process)
    number = getattr(signal, name)
    os.kill(process.pid, number) if to == "supervisor" else os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert out == f"seen ['{name}']\n"
    assert process.returncode == 0, err


def test_default_action_ends_both_alike(bench):
    process = start(bench, "import os, time\nprint('ready', os.getpid(), flush=True)\ntime.sleep(30)\n")
    until_ready(process)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_ignored_signal_stays_ignored(bench):
    """As under nohup: the script must inherit it."""
    bench.script("import signal\nprint(*(int(signal.getsignal(s)) for s in (signal.SIGHUP, signal.SIGPIPE, signal.SIGINT)))\n")
    outs = [bench.call(["sh", "-c", f"trap '' HUP INT; {sys.executable} {words}"]).stdout for words in ("train.py", "-m osler run train.py")]
    assert outs[0] == outs[1] and outs[0].startswith(b"1 1 1")


def test_killed_supervisor_leaves_the_training_alone(bench):
    process = start(bench, "import os, time\nprint('ready', os.getpid(), flush=True)\ntime.sleep(1.5)\nopen('finished', 'w').close()\n")
    until_ready(process)
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 20
    while not (bench.folder / "finished").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert (bench.folder / "finished").exists()


def test_stop_and_continue(bench):
    process = start(bench, "import os, time\nprint('ready', os.getpid(), flush=True)\ntime.sleep(1)\nprint('done')\n")
    until_ready(process)
    os.killpg(process.pid, signal.SIGTSTP)
    pid, status = os.waitpid(process.pid, os.WUNTRACED)
    assert pid == process.pid and os.WIFSTOPPED(status)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "done\n"
    assert process.returncode == 0


def terminal(bench, words, act=None):
    """Runs in a terminal of its own; returns everything it showed and the wait status."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(bench.folder)
        os.execve(words[0], words, bench.env)
    shown = b""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(master, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
        if act is not None and b"ready" in shown:
            time.sleep(0.4)
            os.write(master, act)
            act = None
    status = os.waitpid(pid, 0)[1]
    os.close(master)
    return shown.decode(errors="replace"), status


def test_ctrl_c_in_a_terminal(bench):
    bench.script(COUNTER)
    shown, status = terminal(bench, [sys.executable, "-m", "osler", "run", "train.py"], b"\x03")
    assert "seen ['SIGINT']" in shown and os.waitstatus_to_exitcode(status) == 0


def test_ctrl_c_ends_a_plain_script_by_sigint(bench):
    bench.script("import time\nprint('ready', flush=True)\ntime.sleep(30)\n")
    shown, status = terminal(bench, [sys.executable, "-m", "osler", "run", "train.py"], b"\x03")
    assert shown.count("KeyboardInterrupt") == 1 and "osler/cli" not in shown
    assert os.waitstatus_to_exitcode(status) == -signal.SIGINT


def test_terminal_and_stdin_are_the_scripts(bench):
    bench.script("import sys\nprint(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())\nprint('got', input('ready? '))\n")
    shown, status = terminal(bench, [sys.executable, "-m", "osler", "run", "train.py"], b"yes\n")
    assert "True True True" in shown and "got yes" in shown
    assert os.waitstatus_to_exitcode(status) == 0
