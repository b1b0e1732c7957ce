"""Wine cultivars with LayerNorm, SGD, cosine decay per epoch and gradient accumulation over two micro-batches."""
import sys

import torch
from sklearn.datasets import load_wine
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
wine = load_wine()
x, y = torch.tensor(wine.data, dtype=torch.float32), torch.tensor(wine.target, dtype=torch.long)
idx = torch.randperm(len(x))
x_train, y_train, x_val, y_val = x[idx[:120]], y[idx[:120]], x[idx[120:]], y[idx[120:]]
shift, width = x_train.mean(0), x_train.std(0)
x_train, x_val = (x_train - shift) / width, (x_val - shift) / width

ACCUMULATE, EPOCHS = 2, 40
net = nn.Sequential(nn.Linear(13, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS)
objective = nn.CrossEntropyLoss()
for epoch in range(EPOCHS):
    net.train()
    opt.zero_grad()
    for i, part in enumerate(torch.randperm(len(x_train)).split(15)):
        loss = objective(net(x_train[part]), y_train[part])
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            opt.step()
            opt.zero_grad()
    sched.step()
    net.eval()
    with torch.no_grad():
        val = objective(net(x_val), y_val).item()
print(f"METRIC lower {val:.6f}")
