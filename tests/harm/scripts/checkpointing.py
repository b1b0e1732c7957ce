"""Argument: reentrant or plain."""
import sys

import torch
from _end import seed, show
from torch import nn
from torch.utils.checkpoint import checkpoint

seed(6)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.3)) for _ in range(4))
head = nn.Linear(12, 2)
optimizer = torch.optim.Adam([*blocks.parameters(), *head.parameters()], lr=1e-2)
for step in range(10):
    h = torch.randn(8, 12, requires_grad=True)
    for block in blocks:
        h = checkpoint(block, h, use_reentrant=sys.argv[1] == "reentrant")
    loss = nn.functional.cross_entropy(head(h), torch.randint(0, 2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
show(blocks, head)
