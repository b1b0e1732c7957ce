"""u'' = -u with u(0) = 0, u'(0) = 1 by a physics-informed net (gradients of gradients)."""
import torch
from torch import nn

torch.manual_seed(0)
u = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam(u.parameters(), lr=3e-3)


def derivative(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


zero = torch.zeros(1, 1)
for it in range(250):
    t = (torch.rand(64, 1) * 3.0).requires_grad_()
    y = u(t)
    dy = derivative(y, t)
    residual = (derivative(dy, t) + y).pow(2).mean()
    t0 = zero.clone().requires_grad_()
    y0 = u(t0)
    start = y0.pow(2).mean() + (derivative(y0, t0) - 1).pow(2).mean()
    loss = residual + 5 * start
    opt.zero_grad()
    loss.backward()
    opt.step()
with torch.no_grad():
    grid = torch.linspace(0, 3, 50)[:, None]
    print("error", (u(grid) - torch.sin(grid)).abs().max().item())
