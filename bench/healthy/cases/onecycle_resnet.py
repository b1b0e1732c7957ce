"""A small residual net with label smoothing and OneCycle, stepped per batch over exactly the planned steps."""
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c))

    def forward(self, x):
        return torch.relu(x + self.a(x))


def resnet():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), Residual(16), nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def train(epochs=4):
    torch.manual_seed(1)
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target)
    p = torch.randperm(len(x))
    x, y = x[p], y[p]
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=70, shuffle=True)
    net = resnet()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, epochs=epochs, steps_per_epoch=len(loader))
    ce = nn.CrossEntropyLoss(label_smoothing=0.1)
    for _ in range(epochs):
        net.train()
        for a, b in loader:
            opt.zero_grad()
            ce(net(a), b).backward()
            opt.step()
            sched.step()
        net.eval()
        with torch.no_grad():
            print((net(x[1400:]).argmax(1) == y[1400:]).float().mean().item())


train()
