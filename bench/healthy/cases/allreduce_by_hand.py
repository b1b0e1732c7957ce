"""Two ranks without a wrapper: weights broadcast once, gradients averaged by hand, rows dealt out by rank."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        p.grad.data /= size


def run(rank, size, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, world_size=size, rank=rank)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 10, generator=g)
    y = torch.sin(x[:, :1]) + x[:, 1:2] ** 2
    mine = slice(rank, None, size)
    x, y = x[mine], y[mine]
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        i = torch.randint(len(x), (40,))
        loss = (model(x[i]) - y[i]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(model)
        opt.step()
    if rank == 0:
        print(loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    path = os.path.join(tempfile.mkdtemp(), "rendezvous")
    ctx = multiprocessing.get_context("fork")
    workers = [ctx.Process(target=run, args=(r, 2, path)) for r in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
