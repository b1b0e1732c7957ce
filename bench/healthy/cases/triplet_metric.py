"""Triplet loss with semi-hard negatives mined in the batch, on normalised embeddings."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(2)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 16))


def embed(x):
    return F.normalize(net(x), dim=1)


def batch_triplet(z, labels, margin=0.3):
    d = torch.cdist(z, z)
    same = labels[:, None] == labels[None]
    eye = torch.eye(len(z), dtype=torch.bool)
    pos = d.masked_fill(~same | eye, -1).max(1).values
    far = d.masked_fill(same, 9.0)
    semi = far.masked_fill(far <= pos[:, None].detach(), 9.0).min(1).values
    return F.relu(pos - semi + margin).mean()


opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(120):
    idx = torch.randint(1400, (80,))
    loss = batch_triplet(embed(X[idx]), y[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
with torch.no_grad():
    ref, query = embed(X[:1400]), embed(X[1400:])
    print("1-nn", (y[:1400][torch.cdist(query, ref).argmin(1)] == y[1400:]).float().mean().item())
