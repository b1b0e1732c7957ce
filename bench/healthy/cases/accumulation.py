"""Gradient accumulation over four micro-batches with the loss divided; the rest of the epoch is stepped too."""
import torch
import torch.nn as nn
from sklearn.datasets import make_regression
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
X, y = make_regression(1200, 20, noise=5.0, random_state=2)
X = StandardScaler().fit(X[:1000]).transform(X)
y = (y - y[:1000].mean()) / y[:1000].std()
ds = TensorDataset(torch.tensor(X[:1000], dtype=torch.float32), torch.tensor(y[:1000], dtype=torch.float32).unsqueeze(1))
loader = DataLoader(ds, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
accum = 4
for epoch in range(6):
    opt.zero_grad()
    for i, (a, b) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(a), b)
        (loss / accum).backward()
        if i % accum == 0 or i == len(loader):
            opt.step()
            opt.zero_grad()
model.eval()
with torch.no_grad():
    xv, yv = torch.tensor(X[1000:], dtype=torch.float32), torch.tensor(y[1000:], dtype=torch.float32).unsqueeze(1)
    print(nn.functional.mse_loss(model(xv), yv).item())
