"""The launchers of real torch: ranks are watched, launchers and loader workers stay silent."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = pytest.mark.slow
TRAIN = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
def train(rank=None, world=2):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
    for x, y in DataLoader(rows, batch_size=8, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    total = sum(p.double().sum().item() for p in model.parameters())
    open(f"sum-{torch.distributed.get_rank()}", "a").write(f"{total!r}\\n")
    torch.distributed.destroy_process_group()
if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        torch.multiprocessing.spawn(train, nprocs=2)
"""


def port() -> str:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_ranks(bench, launcher):
    del bench.env["PYTHONPATH"]
    bench.script(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    command = torchrun if launcher == "torchrun" else [sys.executable, "train.py", port()]
    plain = bench.call(command)
    watched = bench.osler("run", "--", *command)
    assert plain.returncode == watched.returncode == 0, watched.stderr.decode()
    assert watched.stdout == plain.stdout
    assert sorted(p.name for p in bench.run.glob("rank-*")) == ["rank-0000", "rank-0001"]
    for rank in (0, 1):
        plain_sum, watched_sum = (bench.folder / f"sum-{rank}").read_text().splitlines()
        assert plain_sum == watched_sum
    assert json.loads((bench.run / "findings.json").read_text())["run"]["ranks"] == 2
