"""Digits with a plain MLP: SGD with momentum, DataLoaders, functions."""
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(x))
x_train, y_train = x[order[:1300]], y[order[:1300]]
x_val, y_val = x[order[1300:]], y[order[1300:]]

train_loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)
val_loader = DataLoader(TensorDataset(x_val, y_val), batch_size=256)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def validate():
    model.eval()
    right = 0
    with torch.no_grad():
        for xb, yb in val_loader:
            right += (model(xb).argmax(1) == yb).sum().item()
    return right / len(x_val)


for epoch in range(12):
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
    accuracy = validate()
print(f"METRIC higher {accuracy:.6f}")
