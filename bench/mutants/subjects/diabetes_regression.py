"""Diabetes progression: standardised regression, batches cut from a permutation by hand."""
import sys

import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
data = load_diabetes()
x, y = torch.tensor(data.data).float(), torch.tensor(data.target).float()
perm = torch.randperm(len(x))
x, y = x[perm], y[perm]
x_train, x_val, y_train, y_val = x[:340], x[340:], y[:340], y[340:]
mean, std = x_train.mean(0), x_train.std(0)
x_train, x_val = (x_train - mean) / std, (x_val - mean) / std
center, scale = y_train.mean(), y_train.std()
y_train, y_val = (y_train - center) / scale, (y_val - center) / scale


class Regressor(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x))


model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
criterion = nn.MSELoss()
for epoch in range(40):
    model.train()
    batches = torch.randperm(len(x_train)).split(34)
    for batch in batches:
        prediction = model(x_train[batch]).squeeze(-1)
        loss = criterion(prediction, y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        residual = model(x_val).squeeze(-1) - y_val
        r2 = 1 - (residual**2).mean() / y_val.var(unbiased=False)
print(f"METRIC higher {r2.item():.6f}")
