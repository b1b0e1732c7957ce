"""A trunk trained on the small digits is frozen and a new head learns the large ones; only the head is in the optimizer."""
import os
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
digits = load_digits()
X, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
first, second = y < 5, y >= 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.trunk(x))


def fit(model, params, X, y, epochs, lr):
    opt = torch.optim.AdamW(params, lr=lr)
    for _ in range(epochs):
        model.train()
        for i in torch.randperm(len(X)).split(32):
            loss = nn.functional.cross_entropy(model(X[i]), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


model = Model()
fit(model, model.parameters(), X[first], y[first], 5, 1e-3)
path = os.path.join(tempfile.mkdtemp(), "trunk.pt")
torch.save(model.trunk.state_dict(), path)

tuned = Model()
tuned.trunk.load_state_dict(torch.load(path))
for p in tuned.trunk.parameters():
    p.requires_grad = False
print(fit(tuned, tuned.head.parameters(), X[second], y[second] - 5, 8, 3e-3))
tuned.eval()
with torch.no_grad():
    print("train accuracy", (tuned(X[second]).argmax(1) == y[second] - 5).float().mean().item())
