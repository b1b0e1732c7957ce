"""Categorical columns through embeddings, numbers through batch norm."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

rng = np.random.default_rng(0)
N = 2400
shop, day, price = rng.integers(0, 12, N), rng.integers(0, 7, N), rng.lognormal(1.0, 0.4, N)
effect_shop, effect_day = rng.normal(0, 1, 12), rng.normal(0, 0.5, 7)
sales = 3 + effect_shop[shop] + effect_day[day] - 0.8 * np.log(price) + rng.normal(0, 0.2, N)
cut = 2000
mean, std = sales[:cut].mean(), sales[:cut].std()


class Table(Dataset):
    def __init__(self, rows):
        self.cats = torch.tensor(np.stack([shop, day], 1)[rows])
        self.nums = torch.tensor(np.log(price)[rows, None], dtype=torch.float32)
        self.y = torch.tensor((sales[rows] - mean) / std, dtype=torch.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.cats[i], self.nums[i], self.y[i]


class TabNet(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in sizes)
        self.norm = nn.BatchNorm1d(1)
        self.mlp = nn.Sequential(nn.Linear(4 * len(sizes) + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, cats, nums):
        parts = [t(cats[:, i]) for i, t in enumerate(self.tables)]
        return self.mlp(torch.cat([*parts, self.norm(nums)], 1)).squeeze(1)


torch.manual_seed(0)
net = TabNet([12, 7])
train, val = DataLoader(Table(slice(0, cut)), 64, shuffle=True), DataLoader(Table(slice(cut, N)), 400)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
for epoch in range(6):
    net.train()
    for c, x, y in train:
        opt.zero_grad()
        nn.functional.mse_loss(net(c, x), y).backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        c, x, y = next(iter(val))
        print(epoch, nn.functional.mse_loss(net(c, x), y).item())
