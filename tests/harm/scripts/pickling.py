"""Classes of __main__ pickle as such; models, optimizers, losses and loaders pickle to the same bytes."""
import hashlib
import io
import pickle

import torch
from _end import seed, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed(15)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)


class Sgd(torch.optim.SGD):
    pass


net, criterion = Net(), nn.CrossEntropyLoss()
optimizer = Sgd(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,))), batch_size=5, shuffle=True)
for _ in range(2):
    for x, y in loader:
        loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    print(repr(loss.item()))
for thing in (net, criterion, optimizer, schedule, loader, nn.functional.cross_entropy, nn.functional.mse_loss):
    data = pickle.dumps(thing)
    back = pickle.loads(data)
    print(type(back).__module__, type(back).__qualname__, len(data))
print(pickle.loads(pickle.dumps(nn.functional.mse_loss)) is nn.functional.mse_loss)
buffer = io.BytesIO()
torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, buffer)
print("checkpoint", hashlib.sha256(buffer.getvalue()).hexdigest())
whole = io.BytesIO()
torch.save(net, whole)
whole.seek(0)
print(repr(torch.load(whole, weights_only=False)), len(whole.getvalue()))
print(sorted(vars(net)), sorted(vars(optimizer)), sorted(vars(loss)), len(net._forward_hooks), len(net._forward_pre_hooks))
show(net)
