"""Three quantiles at once with the pinball loss; heteroscedastic noise."""
import torch
from torch import nn

torch.manual_seed(3)
x = torch.rand(1500, 1) * 4 - 2
y = x.pow(2) + (0.2 + 0.3 * x.abs()) * torch.randn_like(x)
levels = torch.tensor([0.1, 0.5, 0.9])
net = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 3))


def pinball(pred, target):
    err = target - pred
    return torch.maximum(levels * err, (levels - 1) * err).mean()


opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(12):
    for idx in torch.randperm(1200).split(100):
        opt.zero_grad()
        pinball(net(x[idx]), y[idx]).backward()
        opt.step()
with torch.no_grad():
    q = net(x[1200:])
    print("coverage", ((y[1200:] > q[:, :1]) & (y[1200:] < q[:, 2:])).float().mean().item())
