"""A quarter of the labels is random by nature (noisy measurement): the loss settles on a high floor, and that is right."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

g = torch.Generator().manual_seed(0)
torch.manual_seed(0)
x = torch.randn(3000, 8, generator=g)
p = torch.sigmoid(1.2 * x[:, 0] - 0.8 * x[:, 1])
y = torch.bernoulli(p, generator=g)
train, test = TensorDataset(x[:2400], y[:2400]), TensorDataset(x[2400:], y[2400:])
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
bce = nn.BCEWithLogitsLoss()
for epoch in range(5):
    model.train()
    for a, b in DataLoader(train, 64, shuffle=True):
        opt.zero_grad()
        loss = bce(model(a).squeeze(-1), b)
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        v = sum(bce(model(a).squeeze(-1), b).item() * len(b) for a, b in DataLoader(test, 200)) / len(test)
    print(epoch, round(v, 4))
