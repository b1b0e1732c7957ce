"""Two gloo ranks. Argument: spawn, or torchrun (then started by torch.distributed.run)."""
import os
import sys

import torch
import torch.distributed as dist
from _end import digest, seed
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world, store):
    seed(34 + rank)
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    for _step in range(8):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lines.append(f"rank {rank} {loss.item()!r}")
    lines += [digest(*model.state_dict().values()), digest(torch.get_rng_state())]
    for turn in range(world):
        dist.barrier()
        if turn == rank:
            print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        store = os.path.abspath(f"store-{os.getpid()}")
        mp.spawn(train, (2, store), nprocs=2)
        if os.path.exists(store):
            os.remove(store)
    else:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
