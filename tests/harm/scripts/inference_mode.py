import torch
from _end import seed, show
from torch import nn

seed(30)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
criterion = nn.MSELoss()
with torch.inference_mode():
    frozen = torch.randn(8, 6)
    print(repr(criterion(model(frozen), torch.zeros(8, 4)).item()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x = torch.randn(8, 6)
    loss = criterion(model(x), torch.zeros(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.inference_mode():
        value = criterion(model(frozen), torch.zeros(8, 4))
        print(step, repr(loss.item()), repr(value.item()), value.is_inference(), value._version if not value.is_inference() else "")
    with torch.no_grad(), torch.set_grad_enabled(True):
        print(criterion(model(x), x[:, :4]).requires_grad)
show(model)
