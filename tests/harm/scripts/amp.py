"""Argument: bf16 or fp16 (with a GradScaler)."""
import sys

import torch
from _end import seed, show
from torch import nn

seed(28)
half = sys.argv[1] == "fp16"
model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=2.0**18, growth_interval=4)
for step in range(14):
    with torch.autocast("cpu", dtype=torch.float16 if half else torch.bfloat16):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 6) * 20), torch.randint(0, 4, (8,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, repr(loss.item()), repr(norm.item()), scaler.get_scale())
show(model)
