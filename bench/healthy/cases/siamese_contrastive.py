"""Siamese encoder with contrastive loss on pairs of digits."""
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, X, y, n, seed):
        rng = np.random.RandomState(seed)
        self.X, self.rows = X, []
        by = [np.flatnonzero(y == c) for c in range(10)]
        for _ in range(n):
            same = rng.rand() < 0.5
            a = rng.randint(10)
            b = a if same else (a + rng.randint(1, 10)) % 10
            self.rows.append((rng.choice(by[a]), rng.choice(by[b]), float(same)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        i, j, same = self.rows[k]
        return self.X[i], self.X[j], torch.tensor(same)


def contrastive(a, b, same, margin=1.0):
    d = F.pairwise_distance(a, b)
    return (same * d.pow(2) + (1 - same) * F.relu(margin - d).pow(2)).mean()


torch.manual_seed(0)
digits = load_digits()
X = torch.tensor(digits.data / 16, dtype=torch.float32)
encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.Adam(encoder.parameters(), 1e-3)
pairs = DataLoader(Pairs(X, digits.target, 2000, 0), batch_size=50, shuffle=True)
for epoch in range(3):
    for a, b, same in pairs:
        loss = contrastive(encoder(a), encoder(b), same)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
