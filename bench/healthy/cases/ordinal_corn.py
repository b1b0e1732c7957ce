"""Ordinal grades as cumulative thresholds (one score, four sorted cut points)."""
import torch
from torch import nn
import torch.nn.functional as F


class Ordinal(nn.Module):
    def __init__(self, d, grades):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 1))
        self.first = nn.Parameter(torch.tensor(-2.0))
        self.gaps = nn.Parameter(torch.zeros(grades - 2))

    def forward(self, x):
        cuts = torch.cat([self.first[None], self.first + torch.cumsum(F.softplus(self.gaps), 0)])
        return self.score(x) - cuts


g = torch.Generator().manual_seed(0)
torch.manual_seed(0)
x = torch.randn(1500, 6, generator=g)
latent = x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.3 * torch.randn(1500, generator=g)
grade = torch.bucketize(latent, torch.tensor([-0.8, 0.0, 0.7, 1.5]))
above = (grade[:, None] > torch.arange(4)).float()
model = Ordinal(6, 5)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(8):
    for b in torch.randperm(1200).split(60):
        loss = F.binary_cross_entropy_with_logits(model(x[b]), above[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    guess = (model(x[1200:]) > 0).sum(1)
    print("mean absolute error in grades", (guess - grade[1200:]).abs().float().mean().item())
