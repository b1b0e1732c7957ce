"""W1: MLP 784-512-512-10, batch 128, Adam."""
import _clock
import _peers
import torch
from torch import nn

inputs, targets = torch.randn(32, 128, 784), torch.randint(0, 10, (32, 128))
model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
peer, clock = _peers.start(model, optimizer), _clock.Clock()

for step in _clock.steps(800):
    clock.start()
    loss = criterion(model(inputs[step % 32]), targets[step % 32])
    optimizer.zero_grad()
    loss.backward()
    peer.before_step(step, loss)
    optimizer.step()
    peer.after_step(step, loss)
    clock.stop()
clock.write()
