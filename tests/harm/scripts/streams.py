"""Reads stdin, writes bytes and half lines to stdout and stderr, warns and logs."""
import logging
import sys
import warnings

import torch
from _end import seed, show
from torch import nn

seed(36)
print(repr(sys.stdin.read()), sys.argv[1:], __name__, sys.stdout.isatty())
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
warnings.simplefilter("always")
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
schedule.step()
for step in range(4):
    loss = nn.functional.mse_loss(model(torch.randn(2, 3)), torch.zeros(1, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    logging.info("step %d loss %r", step, loss.item())
    sys.stdout.write(f"\r{step}")
sys.stdout.buffer.write(b"\x00\xff bytes \xf0\n")
sys.stderr.write("no newline at the end")
show(model)
