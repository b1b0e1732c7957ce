import os
import random
import sys

import torch
from _end import seed, show
from torch import nn

seed(20)
torch.set_num_threads(1)
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(steps):
    for step in range(steps):
        loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, repr(loss.item()))


train(4)
sys.stdout.flush()
child = os.fork()
if child == 0:
    random.seed(1)  # Python reseeds it in a fork
    train(6)
    show(model)
    sys.stdout.flush()
    os._exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train(4)
show(model)
