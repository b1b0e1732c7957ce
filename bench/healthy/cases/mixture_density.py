"""Mixture density network for a one-to-many inverse problem."""
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

torch.manual_seed(0)
t = torch.rand(1200, 1)
x = t + 0.3 * torch.sin(2 * 3.14159 * t) + 0.05 * torch.randn_like(t)


class MDN(nn.Module):
    def __init__(self, k=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 40), nn.Tanh())
        self.logits, self.mean, self.scale = nn.Linear(40, k), nn.Linear(40, k), nn.Linear(40, k)

    def forward(self, x):
        h = self.body(x)
        return MixtureSameFamily(Categorical(logits=self.logits(h)), Normal(self.mean(h), nn.functional.softplus(self.scale(h)) + 1e-2))


mdn = MDN()
opt = torch.optim.Adam(mdn.parameters(), lr=5e-3)
for epoch in range(15):
    for i in torch.randperm(1000).split(100):
        loss = -mdn(x[i]).log_prob(t[i].squeeze(1)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    print("held-out", -mdn(x[1000:]).log_prob(t[1000:].squeeze(1)).mean().item())
