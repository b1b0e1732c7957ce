"""W4: two-layer MLP of 738 parameters, batch 16: a step takes well under a millisecond."""
import _clock
import _peers
import torch
from torch import nn

inputs, targets = torch.randn(64, 16, 20), torch.randint(0, 2, (64, 16))
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
peer, clock = _peers.start(model, optimizer), _clock.Clock()

for step in _clock.steps(20000):
    clock.start()
    loss = criterion(model(inputs[step % 64]), targets[step % 64])
    optimizer.zero_grad()
    loss.backward()
    peer.before_step(step, loss)
    optimizer.step()
    peer.after_step(step, loss)
    clock.stop()
clock.write()
