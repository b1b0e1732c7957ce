"""An IterableDataset that generates its rows, with a fresh seed for every epoch and worker-free loading."""
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Spiral(IterableDataset):
    def __init__(self, length, seed=0):
        super().__init__()
        self.length, self.seed, self.epoch = length, seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        self.epoch += 1
        for _ in range(self.length):
            k = int(torch.randint(2, (1,), generator=g))
            r = torch.rand((), generator=g) * 3
            a = r * 2 + 3.1416 * k
            yield torch.stack([r * torch.cos(a), r * torch.sin(a)]) + 0.05 * torch.randn(2, generator=g), k


torch.manual_seed(0)
stream = DataLoader(Spiral(1280), batch_size=64)
net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(5):
    running, seen = 0.0, 0
    for x, k in stream:
        loss = nn.functional.cross_entropy(net(x), k)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item() * len(k)
        seen += len(k)
    print(epoch, running / seen)
