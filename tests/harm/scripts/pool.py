"""A process pool of the user's, with torch in its workers."""
import multiprocessing

import torch
from _end import seed, show
from torch import nn


def work(value):
    torch.manual_seed(value)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 1))
    loss.backward()
    optimizer.step()
    return repr(loss.item())


if __name__ == "__main__":
    seed(35)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, range(4)))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = nn.functional.mse_loss(model(torch.randn(2, 3)), torch.zeros(2, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    show(model)
