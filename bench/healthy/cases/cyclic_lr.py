"""Cyclic learning rate, stepped per batch; the loss goes up and down with it."""
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale
from torch import nn

torch.manual_seed(0)
X, y = load_wine(return_X_y=True)
X, y = torch.tensor(scale(X), dtype=torch.float32), torch.tensor(y)
model = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
cycle = torch.optim.lr_scheduler.CyclicLR(opt, base_lr=0.005, max_lr=0.1, step_size_up=20, mode="triangular2")
for epoch in range(30):
    for idx in torch.randperm(len(X)).split(16):
        loss = nn.functional.cross_entropy(model(X[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        cycle.step()
print(loss.item(), cycle.get_last_lr())
