"""Trains for about three seconds and writes every loss to the file named first, then says how it ended.

Second argument "catch": an interrupt ends the loop, and a second is spent on saving before the exit with code 8.
"""
import sys
import time
from pathlib import Path

import torch
from _end import seed, show
from torch import nn

seed(40)
out, catch = Path(sys.argv[1]), "catch" in sys.argv
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
code = 0
with out.open("w", buffering=1) as file:
    try:
        for step in range(60):
            loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, repr(loss.item()), file=file)
            time.sleep(0.05)
    except KeyboardInterrupt:
        if not catch:
            raise
        time.sleep(1)
        print("saved", file=file)
        code = 8
    print("done", file=file)
show(model)
sys.exit(code)
