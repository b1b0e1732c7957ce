"""Denoising autoencoder with tied encoder and decoder weights."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Tied(nn.Module):
    def __init__(self, d=64, h=32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h, d))
        nn.init.xavier_uniform_(self.weight)
        self.b, self.c = nn.Parameter(torch.zeros(h)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight, self.b)), self.weight.T, self.c)


torch.manual_seed(1)
x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
x = x[torch.randperm(len(x))]
train, test = x[:1500], x[1500:]
ae = Tied()
opt = torch.optim.Adam(ae.parameters(), lr=3e-3)
for epoch in range(8):
    for b in train[torch.randperm(len(train))].split(60):
        loss = F.mse_loss(ae(b + 0.2 * torch.randn_like(b)), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    print(F.mse_loss(ae(test), test).item())
