"""A trained model is tuned on with a learning rate of 1e-6: small on purpose."""
import torch
from sklearn.datasets import load_iris
from torch import nn

torch.manual_seed(7)
iris = load_iris()
x = torch.tensor(iris.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(iris.target)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
pre = torch.optim.Adam(model.parameters(), lr=2e-2)
for _ in range(80):
    loss = nn.functional.cross_entropy(model(x), y)
    pre.zero_grad()
    loss.backward()
    pre.step()
fine = torch.optim.AdamW(model.parameters(), lr=1e-6)
for _ in range(60):
    idx = torch.randint(len(x), (30,))
    loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
    fine.zero_grad()
    loss.backward()
    fine.step()
print(loss.item())
