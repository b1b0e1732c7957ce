"""Mixup: inputs and one-hot targets are blended, so that training accuracy is below validation accuracy."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
perm = torch.randperm(len(X))
tr, va = perm[:1400], perm[1400:]
model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
beta = torch.distributions.Beta(0.4, 0.4)
for epoch in range(6):
    model.train()
    for idx in tr[torch.randperm(len(tr))].split(70):
        x, t = X[idx], F.one_hot(y[idx], 10).float()
        lam, other = beta.sample(), torch.randperm(len(idx))
        x, t = lam * x + (1 - lam) * x[other], lam * t + (1 - lam) * t[other]
        loss = F.cross_entropy(model(x), t)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(epoch, (model(X[va]).argmax(1) == y[va]).float().mean().item())
