import torch
from _end import seed, show
from torch import nn

seed(5)
model = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss(reduction="sum")
for step in range(12):
    optimizer.zero_grad()
    for _ in range(4):
        x, y = torch.randn(4, 10), torch.randint(0, 3, (4,))
        loss = criterion(model(x), y) / 16
        loss.backward()
        print(step, repr(loss.item()))
    optimizer.step()
show(model)
