import copy

import torch
from _end import seed, show
from torch import nn

seed(16)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    for step in range(steps):
        loss = nn.functional.l1_loss(model(torch.randn(8, 6)), torch.randn(8, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, repr(loss.item()))


train(model, optimizer, 5)
both = copy.deepcopy({"model": model, "optimizer": optimizer})
train(both["model"], both["optimizer"], 5)
train(model, optimizer, 5)
again = copy.deepcopy(nn.CrossEntropyLoss(weight=torch.ones(3)))
print(repr(again(torch.randn(4, 3), torch.randint(0, 3, (4,))).item()))
average = torch.optim.swa_utils.AveragedModel(model)
average.update_parameters(model)
print(sorted(vars(both["optimizer"])), type(both["optimizer"]).__name__)
show(model, both["model"], average)
