import torch
import torch.nn.functional as F
from _end import seed, show
from torch import nn

seed()
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
for step in range(60):
    x, y = torch.randn(16, 20), torch.randint(0, 4, (16,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(step, repr(loss.item()), repr(norm.item()), schedule.get_last_lr())
show(model)
