"""Sparse autoencoder: an L1 penalty keeps most units at exactly zero."""
import torch
from sklearn.datasets import load_digits
from torch import nn


class SAE(nn.Module):
    def __init__(self, d=64, units=256):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(d))
        self.enc = nn.Linear(d, units)
        self.dec = nn.Linear(units, d, bias=False)

    def forward(self, x):
        code = torch.relu(self.enc(x - self.bias))
        return self.dec(code) + self.bias, code


torch.manual_seed(0)
x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
sae = SAE()
opt = torch.optim.Adam(sae.parameters(), lr=1e-3)
for step in range(250):
    batch = x[torch.randint(len(x), (128,))]
    out, code = sae(batch)
    loss = (out - batch).pow(2).sum(1).mean() + 0.05 * code.abs().sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item(), "active share", (code > 0).float().mean().item())
