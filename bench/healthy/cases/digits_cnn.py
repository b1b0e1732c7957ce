"""A small convolutional net on the 8x8 digits with a cosine schedule."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 2 * 2, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def main():
    torch.manual_seed(3)
    images = load_digits()
    x = torch.from_numpy(images.images).float().unsqueeze(1) / 16.0
    y = torch.from_numpy(images.target)
    perm = torch.randperm(len(x))
    x, y = x[perm], y[perm]
    ntrain = 1400
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    epochs, bs = 5, 50
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
    for epoch in range(epochs):
        net.train()
        for idx in torch.randperm(ntrain).split(bs):
            loss = F.cross_entropy(net(x[idx]), y[idx])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        sched.step()
        net.eval()
        with torch.inference_mode():
            acc = (net(x[ntrain:]).argmax(1) == y[ntrain:]).float().mean()
        print(epoch, round(acc.item(), 4))


if __name__ == "__main__":
    main()
