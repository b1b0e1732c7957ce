"""Stochastic weight averaging with torch's AveragedModel, its schedule, and batch norm statistics renewed at the end."""
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
perm = torch.randperm(len(X))
tr, te = perm[:1400], perm[1400:]
loader = DataLoader(TensorDataset(X[tr], y[tr]), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
averaged = AveragedModel(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6)
swa = SWALR(opt, swa_lr=0.02, anneal_epochs=2)
for epoch in range(9):
    model.train()
    for a, b in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
    if epoch >= 5:
        averaged.update_parameters(model)
        swa.step()
    else:
        cosine.step()
update_bn(loader, averaged)
averaged.eval()
with torch.no_grad():
    print((averaged(X[te]).argmax(1) == y[te]).float().mean().item())
