import os
import subprocess
import sys

import torch
from _end import seed, show
from torch import nn

seed(21)
CHILD = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(2, 1)
o = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(3):
    loss = torch.nn.functional.mse_loss(m(torch.ones(1, 2)), torch.ones(1, 1))
    o.zero_grad(); loss.backward(); o.step()
    print(repr(loss.item()))
raise SystemExit(9)
"""
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
    done = subprocess.run([sys.executable, "-c", CHILD if step == 1 else "print('no torch')"], capture_output=True, text=True)
    print(done.returncode, repr(done.stdout), repr(done.stderr))
print(os.popen("echo from a shell").read(), end="")
show(model)
