"""MAML on sine waves: functional inner step with create_graph, outer Adam."""
import torch
from torch import nn
from torch.func import functional_call

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
meta = torch.optim.Adam(net.parameters(), lr=2e-3)


def task():
    amp, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * 3.14
    def draw(n=10):
        x = torch.rand(n, 1) * 6 - 3
        return x, amp * torch.sin(x + phase)
    return draw


def mse(params, x, y):
    return ((functional_call(net, params, (x,)) - y) ** 2).mean()


for it in range(60):
    outer = 0.0
    for _ in range(4):
        draw = task()
        params = dict(net.named_parameters())
        inner = mse(params, *draw())
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {k: p - 0.05 * g for (k, p), g in zip(params.items(), grads)}
        outer = outer + mse(fast, *draw()) / 4
    meta.zero_grad()
    outer.backward()
    meta.step()
print(outer.item())
