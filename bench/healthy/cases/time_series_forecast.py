"""Forecast the next value of a noisy seasonal series; the split is by time and scaling uses the past only."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
t = np.arange(1500)
series = np.sin(2 * np.pi * t / 24) + 0.5 * np.sin(2 * np.pi * t / 168) + 0.1 * rng.normal(size=len(t))
split, window = 1100, 48
mu, sd = series[:split].mean(), series[:split].std()
series = torch.tensor((series - mu) / sd, dtype=torch.float32)


class Windows(Dataset):
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values) - window

    def __getitem__(self, i):
        return self.values[i:i + window, None], self.values[i + window]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, dilation=2), nn.ReLU(), nn.Conv1d(16, 16, 5, dilation=4), nn.ReLU())
        self.head = nn.Linear(16 * 24, 1)

    def forward(self, x):
        return self.head(self.conv(x.transpose(1, 2)).flatten(1)).squeeze(1)


torch.manual_seed(0)
train, test = DataLoader(Windows(series[:split]), 64, shuffle=True), DataLoader(Windows(series[split:]), 64)
net = Forecaster()
opt = torch.optim.Adam(net.parameters(), 2e-3)
for epoch in range(4):
    net.train()
    for x, y in train:
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    err = n = 0
    with torch.no_grad():
        for x, y in test:
            err += (net(x) - y).pow(2).sum().item()
            n += len(y)
    print(epoch, err / n)
