"""Neural ODE with a fixed-step Euler solver fits a damped oscillation."""
import torch
from torch import nn

torch.manual_seed(0)
A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
ts = torch.linspace(0, 2, 21)
truth = torch.stack([torch.matrix_exp(A * t) @ torch.tensor([1.0, 0.0]) for t in ts])


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, y):
        return self.f(y)


def solve(field, y0, times):
    ys, y = [y0], y0
    for a, b in zip(times[:-1], times[1:]):
        k1 = field(y)
        k2 = field(y + (b - a) * k1 / 2)
        y = y + (b - a) * k2
        ys.append(y)
    return torch.stack(ys)


field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
for it in range(100):
    start = int(torch.randint(0, 11, (1,)))
    pred = solve(field, truth[start], ts[start:start + 10])
    loss = (pred - truth[start:start + 10]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
