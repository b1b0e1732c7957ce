import torch
from _end import seed, show
from torch import nn

seed(29)
torch.set_default_device("cpu")
with torch.device("meta"):
    ghost = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    print(nn.functional.mse_loss(ghost(torch.randn(2, 1000)), torch.randn(2, 1000)).device)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()), torch.get_default_device())
torch.set_default_device("meta")
print(torch.zeros(3).device)
lost = nn.Linear(4, 4)
meta_optimizer = torch.optim.SGD(lost.parameters(), lr=0.1)
loss = lost(torch.zeros(2, 4)).sum()
loss.backward()
meta_optimizer.step()
print(loss)
torch.set_default_device("cpu")
show(model)
