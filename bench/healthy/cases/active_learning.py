"""Active learning: each round labels the least certain pool items, then a new model is trained from scratch."""
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
perm = torch.randperm(len(X))
pool, test = perm[:1400].tolist(), perm[1400:]
labelled, pool = pool[:60], pool[60:]


def fresh():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, torch.optim.Adam(net.parameters(), lr=5e-3)


for rnd in range(4):
    net, opt = fresh()
    idx = torch.tensor(labelled)
    for epoch in range(20):
        for b in idx[torch.randperm(len(idx))].split(20):
            opt.zero_grad()
            nn.functional.cross_entropy(net(X[b]), y[b]).backward()
            opt.step()
    net.eval()
    with torch.no_grad():
        print(rnd, len(labelled), (net(X[test]).argmax(1) == y[test]).float().mean().item())
        prob = net(X[pool]).softmax(1)
    pick = set(prob.max(1).values.argsort()[:60].tolist())
    labelled += [p for i, p in enumerate(pool) if i in pick]
    pool = [p for i, p in enumerate(pool) if i not in pick]
