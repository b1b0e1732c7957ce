"""Contrastive pretraining (NT-Xent) with noise and shifts as augmentation."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(11)
images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16


def augment(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, (dx, dy), (2, 3)) + 0.1 * torch.randn_like(x)


def nt_xent(a, b, t=0.2):
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = z @ z.T / t
    sim = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    n = len(a)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 64))
projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
params = list(encoder.parameters()) + list(projector.parameters())
opt = torch.optim.AdamW(params, lr=1e-3)
for epoch in range(4):
    total = 0.0
    batches = torch.randperm(len(images)).split(128)
    for idx in batches:
        x = images[idx]
        loss = nt_xent(projector(encoder(augment(x))), projector(encoder(augment(x))))
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
    print(epoch, float(total) / len(batches))
