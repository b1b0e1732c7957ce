"""Cosine annealing with warm restarts on a regression problem; a jump of the loss at each restart is meant."""
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn

np.random.seed(0)
torch.manual_seed(0)
X, t = load_diabetes(return_X_y=True)
Xa, Xb, ta, tb = train_test_split(X, t, random_state=1)
mx, sx, mt, st = Xa.mean(0), Xa.std(0), ta.mean(), ta.std()
to = lambda a: torch.tensor(a, dtype=torch.float32)
Xa, Xb, ta, tb = to((Xa - mx) / sx), to((Xb - mx) / sx), to((ta - mt) / st)[:, None], to((tb - mt) / st)[:, None]
reg = nn.Sequential(nn.Linear(10, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 1))
opt = torch.optim.AdamW(reg.parameters(), lr=1e-2, weight_decay=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=5, T_mult=2, eta_min=1e-4)
mse = nn.MSELoss()
for epoch in range(35):
    reg.train()
    order = np.random.permutation(len(Xa))
    for start in range(0, len(order), 32):
        b = order[start:start + 32]
        loss = mse(reg(Xa[b]), ta[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    sched.step()
reg.eval()
with torch.no_grad():
    print("validation mse", mse(reg(Xb), tb).item())
