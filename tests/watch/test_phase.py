"""Stretches without gradients: averages and clipping at every step are left in peace, a validation between them is still seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from osler.store.files import write_json
from osler.store.reader import RunReader

SCRIPT = """
import copy, sys
from pathlib import Path
from osler.watch.install import install
import torch
from torch import nn
install(Path(sys.argv[1]), 0.02)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(6, 2)
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 6), torch.randint(0, 2, (32,))
for step in range(1500):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()):
            a.lerp_(p, 0.05)
    if step % 500 == 499:
        with torch.no_grad():
            nn.functional.cross_entropy(model(x), y)
"""


def test_work_at_every_step_does_not_end_the_fast_lane(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "run.json", {"schema": 1, "id": "run"})
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py", str(folder)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    reader = RunReader(folder)
    reader.refresh()
    window = reader.window(0)
    assert len(window.steps) == 1500
    counted = np.isnan(window.steps["lr"])
    assert counted.mean() > 0.5, "most of these short steps are only counted"
    assert (np.diff(window.steps["loss"]) == 0).mean() < 0.02, "a row has the loss of its own step"
    assert len([f for f in window.facts("phase") if f.get("kind") == "validation"]) >= 2
    assert not [f for f in window.facts("self") if f.get("what") == "guard"]
