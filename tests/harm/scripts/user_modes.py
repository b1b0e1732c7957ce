"""The user's own function and dispatch modes see only the user's own calls."""
import torch
from _end import seed, show
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

seed(14)


called, dispatched = [], []


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        called.append(resolve_name(function) or str(function))
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        dispatched.append(str(function))
        return function(*args, **(kwargs or {}))


model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
for step in range(6):
    x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
    with Functions() if step % 2 else Operations():
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(step, repr(loss.item()))
print("\n".join(called))
print("\n".join(dispatched))
show(model)
