"""An exponential average of the weights is kept by hand and used for validation."""
import copy

import torch
from sklearn.datasets import load_wine
from torch import nn

torch.manual_seed(9)
X, y = load_wine(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
order = torch.randperm(len(X))
X, y = X[order], y[order]
mean, std = X[:130].mean(0), X[:130].std(0)
X = (X - mean) / std
model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@torch.no_grad()
def update_ema(decay=0.95):
    for slow, fast in zip(ema.parameters(), model.parameters()):
        slow.mul_(decay).add_(fast, alpha=1 - decay)


for epoch in range(20):
    for b in torch.randperm(130).split(13):
        loss = nn.functional.cross_entropy(model(X[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema()
    ema.eval()
    with torch.no_grad():
        acc = (ema(X[130:]).argmax(1) == y[130:]).float().mean().item()
print(acc)
