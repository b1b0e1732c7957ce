"""RealNVP couplings on moons; the negative log-likelihood falls below zero and may."""
import math

import torch
from sklearn.datasets import make_moons
from torch import nn


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.flip = flip
        self.s = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        a, b = x[:, :1], x[:, 1:]
        if self.flip:
            a, b = b, a
        s = self.s(a)
        b = b * s.exp() + self.t(a)
        out = torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)
        return out, s.sum(1)


class Flow(nn.Module):
    def __init__(self, n=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(n))

    def log_prob(self, x):
        total = 0.0
        for layer in self.layers:
            x, ld = layer(x)
            total = total + ld
        return total - 0.5 * x.pow(2).sum(1) - math.log(2 * math.pi)


torch.manual_seed(0)
x = torch.tensor(make_moons(2000, noise=0.06, random_state=0)[0], dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
for i in range(150):
    nll = -flow.log_prob(x[torch.randint(len(x), (200,))]).mean()
    opt.zero_grad()
    nll.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
    opt.step()
print(nll.item())
