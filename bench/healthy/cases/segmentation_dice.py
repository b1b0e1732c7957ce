"""Binary segmentation of discs with a small U-shaped net; soft Dice plus cross entropy."""
import torch
import torch.nn.functional as F
from torch import nn


def discs(n, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.rand(n, 2, 1, 1) * (size - 10) + 5
    r = torch.rand(n, 1, 1) * 3 + 3
    mask = ((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2 < r ** 2).float().unsqueeze(1)
    return mask * 0.8 + 0.4 * torch.randn_like(mask), mask


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.mid(F.max_pool2d(a, 2)))
        return self.out(torch.cat([a, b], 1))


def dice_loss(logits, mask, eps=1.0):
    p = torch.sigmoid(logits)
    inter = (p * mask).sum((1, 2, 3))
    return 1 - ((2 * inter + eps) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + eps)).mean()


torch.manual_seed(0)
net = UNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
xv, mv = discs(64)
for step in range(80):
    x, m = discs(16)
    logits = net(x)
    loss = dice_loss(logits, m) + F.binary_cross_entropy_with_logits(logits, m)
    opt.zero_grad()
    loss.backward()
    opt.step()
net.eval()
with torch.no_grad():
    print("validation dice", 1 - dice_loss(net(xv), mv).item())
