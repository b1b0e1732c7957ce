"""A small student learns from a frozen teacher (soft targets at temperature 3) and from the labels."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


def net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def accuracy(model, loader):
    model.eval()
    hits, n = 0, 0
    with torch.no_grad():
        for x, y in loader:
            hits += (model(x).argmax(-1) == y).sum().item()
            n += y.numel()
    return hits / n


g = torch.Generator().manual_seed(4)
torch.manual_seed(4)
X, y = load_digits(return_X_y=True)
full = TensorDataset(torch.as_tensor(X, dtype=torch.float32) / 16, torch.as_tensor(y))
train, val = random_split(full, [1400, len(full) - 1400], generator=g)
tl, vl = DataLoader(train, 50, shuffle=True, generator=g), DataLoader(val, 200)
teacher, student = net(256), net(16)
opt = torch.optim.Adam(teacher.parameters(), 1e-3)
for _ in range(5):
    teacher.train()
    for a, b in tl:
        opt.zero_grad()
        F.cross_entropy(teacher(a), b).backward()
        opt.step()
print("teacher", accuracy(teacher, vl))
teacher.eval().requires_grad_(False)
T, alpha = 3.0, 0.7
opt = torch.optim.Adam(student.parameters(), 3e-3)
for _ in range(6):
    student.train()
    for a, b in tl:
        with torch.no_grad():
            soft = F.softmax(teacher(a) / T, dim=1)
        out = student(a)
        loss = alpha * T * T * F.kl_div(F.log_softmax(out / T, dim=1), soft, reduction="batchmean") + (1 - alpha) * F.cross_entropy(out, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
print("student", accuracy(student, vl))
