"""Experiments in a forked copy do no harm: the real run's numbers, output, signals, children and files stay as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
import torch
from torch import nn

from osler.watch.experiments import Capture, obstacle, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Apply(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.first, self.fn = nn.Linear(8, 12), fn

    def forward(self, x):
        return self.fn(self.first(x))


def flat(n=20):
    return torch.randn(n, 8), torch.randint(0, 3, (n,))


def mlp():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))


def capture_of(root: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Capture:
    return Capture(root, 0, {id(m): name for name, m in root.named_modules()}, lambda m: None, (x,), {}, root(x), target)


def finish(job: Any, patience: float = 60.0) -> list[dict[str, Any]]:
    assert job is not None
    end = time.monotonic() + patience
    while (facts := job.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return facts


def by_name(facts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in facts}


def test_a_copy_cannot_reach_outside(tmp_path):
    there = tmp_path / "kept.txt"
    there.write_text("kept")
    shared = torch.zeros(4).share_memory_()
    handle = open(there)  # noqa: SIM115
    x, y = flat()

    def doing(act):
        def forward(h):
            if os.getpid() != owner:
                act()
            return h

        return by_name(finish(start(capture_of(Apply(forward), x, y), seconds=10.0)))

    owner = os.getpid()
    for act in (lambda: there.write_text("lost"), lambda: os.remove(there), lambda: subprocess.run(["true"]), lambda: handle.read(1)):
        facts = doing(act)
        assert "could not be repeated" in facts["batch-mixing"]["why"] or "failed" in facts["batch-mixing"]
    crash = doing(lambda: shared.add_(1))
    assert "failed" in next(iter(crash.values())) and float(shared.sum()) == 0.0
    assert there.read_text() == "kept" and handle.tell() == 0
    handle.close()


def test_a_slow_copy_is_ended():
    x, y = flat()
    owner = os.getpid()
    slow = Apply(lambda h: time.sleep(60) or h if os.getpid() != owner else h)
    begin = time.monotonic()
    facts = finish(start(capture_of(slow, x, y), seconds=0.5))
    assert time.monotonic() - begin < 5 and "failed" in facts[-1]
    job = start(capture_of(slow, x, y), seconds=60)
    job.cancel()
    assert job.poll() == []


def test_where_a_fork_is_no_option():
    x, y = flat()
    capture = capture_of(mlp(), x, y)
    assert obstacle(capture) is None
    capture.args = (torch.empty(2, 8, device="meta"),)
    assert "meta" in obstacle(capture) and start(capture) is None
    shared = capture_of(mlp().share_memory(), x, y)
    assert "shared" in obstacle(shared)
    compiled = mlp()
    compiled.compile()
    capture = capture_of(mlp(), x, y)
    capture.root = compiled
    assert "compiled" in obstacle(capture)


SCRIPT = """
import atexit, hashlib, os, signal, sys, time, random
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1); torch.manual_seed(0); random.seed(0); np.random.seed(0)
calls = []
signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
atexit.register(lambda: print("atexit", os.getpid() == owner))
owner = os.getpid()
sys.stdout.write("buffered ")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.d, self.b = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3)
    def forward(self, x):
        if WATCH and os.getpid() != owner: print("from the copy"); sys.stderr.write("from the copy")
        return self.b(self.d(self.bn(self.a(x)).relu()))
net = Net(); opt = torch.optim.Adam(net.parameters()); job = None
before = (dict(globals()).keys(), len(__import__("warnings").filters))
for step in range(40):
    x, y = torch.randn(24, 8), torch.randint(0, 3, (24,))
    out = net(x); loss = F.cross_entropy(out, y); opt.zero_grad(); loss.backward(); opt.step()
    print(loss.item().hex(), random.random(), np.random.rand())
    if WATCH and step == 1:
        from osler.watch.experiments import Capture, start
        job = start(Capture(net, 0, {}, lambda m: None, (x,), {}, out, y))
        assert job is not None
if WATCH:
    while job.poll() is None: time.sleep(0.01)
    assert {f["name"] for f in job.poll()} >= {"batch-mixing", "pass-repeat"}, job.poll()
assert not calls, calls
try: os.wait(); print("somebody's child")
except ChildProcessError: print("no children")
child = os.fork()
if child == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]), len(calls), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.state_dict().values())).hexdigest())
"""


def test_the_run_is_bit_identical_and_undisturbed():
    runs = [subprocess.run([sys.executable, "-c", f"WATCH = {watch}\n" + SCRIPT], capture_output=True, text=True, timeout=120) for watch in (False, True)]
    assert runs[0].returncode == runs[1].returncode == 0, runs[1].stderr
    assert runs[0].stdout == runs[1].stdout and runs[1].stdout.count("buffered") == 1 and runs[1].stdout.count("atexit") == 1
    assert "from the copy" not in runs[1].stdout + runs[1].stderr
    assert runs[0].stderr == runs[1].stderr


def test_warnings_of_others_about_forks_stay_silent():
    code = textwrap.dedent("""
        import os, warnings
        import torch
        from torch import nn
        from osler.watch.experiments import Capture, start
        warnings.simplefilter("default")
        os.register_at_fork(before=lambda: warnings.warn("forks are dangerous", RuntimeWarning))
        def ours(): warnings.warn("said once", UserWarning)
        ours()
        net, x = nn.Linear(4, 2), torch.randn(6, 4)
        assert start(Capture(net, 0, {}, lambda m: None, (x,), {}, net(x), torch.zeros(6, 2))) is not None
        ours()
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "dangerous" not in done.stderr and done.stderr.count("said once") == 1, done.stderr


def test_facts_are_json():
    x, y = flat()
    job = start(capture_of(mlp(), x * float("nan"), y))
    facts = finish(job)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts and job.poll() is facts and job.blocked > 0
    assert all("seconds" in f or "failed" in f for f in facts)
