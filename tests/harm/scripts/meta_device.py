"""Tensors without data stand in for a device: whoever pulls a value to Python fails or is counted here."""
import torch
from _end import seed, show
from torch import nn

seed(37)
SYNC = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::allclose",
        "aten::masked_select", "aten::_to_cpu"}
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to("meta")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    for step in range(40):
        x, y = torch.empty(8, 6, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                criterion(model(x), y)
            model.train()
print({e.key: e.count for e in profile.key_averages() if e.key in SYNC})
print(loss.device, [tuple(p.shape) for p in model.parameters()])
show()
