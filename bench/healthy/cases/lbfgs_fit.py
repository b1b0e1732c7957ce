"""Full-batch LBFGS with a closure and strong Wolfe line search."""
import math

import torch
from torch import nn

torch.manual_seed(0)
t = torch.linspace(-math.pi, math.pi, 200).unsqueeze(1)
target = torch.sin(2 * t) * torch.exp(-0.2 * t)
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=10, line_search_fn="strong_wolfe")


def closure():
    opt.zero_grad()
    loss = ((net(t) - target) ** 2).mean()
    loss.backward()
    return loss


for outer in range(15):
    loss = opt.step(closure)
print(float(loss))
