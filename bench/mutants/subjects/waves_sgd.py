"""A function of four numbers fitted by a tanh network with plain SGD."""
import sys

import torch
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


def target(x):
    return torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3] ** 2


x_train, x_val = torch.randn(1500, 4), torch.randn(500, 4)
y_train, y_val = target(x_train), target(x_val)
y_train = y_train + 0.05 * torch.randn(len(y_train))
layers, size = [], 4
for hidden in (48, 48):
    layers += [nn.Linear(size, hidden), nn.Tanh()]
    size = hidden
model = nn.Sequential(*layers, nn.Linear(size, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(20):
    model.train()
    for batch in torch.randperm(len(x_train)).split(50):
        output = model(x_train[batch])
        loss = nn.functional.mse_loss(output.squeeze(-1), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    r2 = 1 - ((model(x_val).squeeze(-1) - y_val) ** 2).mean() / y_val.var()
print(f"METRIC higher {r2.item():.6f}")
