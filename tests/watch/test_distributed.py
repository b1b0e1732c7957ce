"""Two gloo ranks under osler: what is recorded of them, and that they see each other."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from osler.diagnose import engine, ranks
from osler.store.reader import RunReader

pytest.importorskip("torch")

SCRIPT = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset

    def worker(rank, store):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
        torch.manual_seed(0)
        x = torch.randn(160, 4)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
        model = DDP(nn.Linear(4, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for a, b in loader:
            opt.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            opt.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        if rank == 1:
            raise ValueError("told from a worker")

    if __name__ == "__main__":
        mp.start_processes(worker, args=(os.path.abspath("store"),), nprocs=2, start_method="fork")
"""


def test_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, "-m", "osler", "run", "--dir", "runs", "--quiet", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "ValueError: told from a worker" in done.stderr and "osler" not in done.stderr.split("Traceback", 1)[1]
    reader = RunReader(next((tmp_path / "runs").glob("2*")))
    windows = ranks.together({(r, 1): reader.window(r) for r in reader.ranks()})
    first, second = windows[0, 1], windows[1, 1]
    assert [w.rank for w in (first, second)] == [0, 1] and first.peers[0].rank == 1 and second.peers[0].rank == 0
    for window in (first, second):
        assert window.last("process-group")["world"] == 2 and window.n_steps == 10
        assert window.last("ddp")["class"] == "Linear" and not window.last("ddp")["find_unused_parameters"]
        assert window.last("collective")["kinds"] == {"value": 1} and window.last("collective")["op"] == "SUM"
        assert [f["number"] for f in window.facts("parameter-print")] == [0, 1, 2, 5, 10]
        assert all(f["wrapper"] == 1 and not f["no_sync"] for f in window.facts("rank-step"))
    assert [f["values"] for f in first.facts("parameter-print")] == [f["values"] for f in second.facts("parameter-print")]
    assert second.last("exception")["type"] == "ValueError" and second.last("exit")["steps"] == 10 and first.last("exception") is None
    found = [f for f in engine.diagnose(first).findings if f.cause == "ddp-no-sampler"]
    assert found and found[0].where.line == 12
