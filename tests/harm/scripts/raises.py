"""An error in the loop: the same traceback, the same exit code."""
import torch
from _end import seed, show
from torch import nn

seed(17)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
for step in range(5):
    loss = criterion(model(torch.randn(8, 6)), torch.randint(0, 4, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
try:
    loss.backward()
except RuntimeError as error:
    print(error)
show(model)
criterion(model(torch.randn(8, 6)), torch.randint(0, 4, (9,)))
