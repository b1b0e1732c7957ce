"""Random search over six settings; some of them are poor choices, which is what the search is for."""
import random

import torch
from sklearn.datasets import load_wine
from torch import nn

random.seed(3)
X, y = load_wine(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
X, y = X[order], y[order]
X = (X - X[:120].mean(0)) / X[:120].std(0)


def run(lr, width, decay, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 3))
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay)
    for epoch in range(12):
        for b in torch.randperm(120).split(24):
            loss = nn.functional.cross_entropy(net(X[b]), y[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
    net.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(net(X[120:]), y[120:]).item()


trials = [dict(lr=10 ** random.uniform(-3.3, -1.5), width=random.choice([8, 16, 64]), decay=random.choice([0.0, 1e-2])) for _ in range(6)]
results = sorted((run(**t, seed=i), i) for i, t in enumerate(trials))
print(results[0], trials[results[0][1]])
