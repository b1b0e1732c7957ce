"""W2: a small ResNet on 3x32x32 images, batch 32, SGD with momentum."""
import _clock
import _peers
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Sequential()
        if stride != 1 or into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(h)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1),
                                    Block(64, 128, 2), Block(128, 128, 1))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


inputs, targets = torch.randn(8, 32, 3, 32, 32), torch.randint(0, 10, (8, 32))
model = ResNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
peer, clock = _peers.start(model, optimizer), _clock.Clock()

for step in _clock.steps(100):
    clock.start()
    loss = F.cross_entropy(model(inputs[step % 8]), targets[step % 8])
    optimizer.zero_grad()
    loss.backward()
    peer.before_step(step, loss)
    optimizer.step()
    peer.after_step(step, loss)
    clock.stop()
clock.write()
