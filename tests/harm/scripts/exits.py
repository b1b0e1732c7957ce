"""Argument: how it ends: code, text, abrupt, segfault, interrupt, terminate or kill."""
import atexit
import os
import signal
import sys

import torch
from _end import seed, show
from torch import nn

seed(19)
atexit.register(print, "at exit")
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
show(model)
sys.stdout.flush()
how = sys.argv[1]
if how == "code":
    sys.exit(3)
if how == "text":
    sys.exit("a message")
if how == "abrupt":
    os._exit(5)
number = {"segfault": signal.SIGSEGV, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]
os.kill(os.getpid(), number)
signal.pause()
