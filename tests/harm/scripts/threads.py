"""Two models, each trained by a thread of its own."""
import threading

import torch
from _end import seed, show
from torch import nn

seed(33)
models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
lines = [[], []]


def train(i):
    draw = torch.Generator().manual_seed(i)
    optimizer = torch.optim.Adam(models[i].parameters(), lr=1e-2)
    for step in range(60):
        x, y = torch.randn(8, 6, generator=draw), torch.randint(0, 4, (8,), generator=draw)
        loss = nn.functional.cross_entropy(models[i](x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lines[i].append(repr(loss.item()))
        if i == 1 and step == 30:
            with torch.no_grad():
                lines[i].append(repr(models[i](x).sum().item()))


threads = [threading.Thread(target=train, args=(i,)) for i in range(2)]
for t in threads:
    t.start()
for t in threads:
    t.join()
print(lines)
show(*models)
