import torch
from _end import seed, show
from torch import nn

seed(4)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
x, y = torch.randn(50, 5), torch.randn(50, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(8):
    print(step, repr(optimizer.step(closure).item()))
show(model)
