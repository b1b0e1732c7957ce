import torch
from _end import seed, show
from torch import nn

seed(18)


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on purpose")


model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
show(model)
Faulty.apply(model(torch.randn(8, 6))).sum().backward()
