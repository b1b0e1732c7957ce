"""Forward, backward and optimizer step in one compiled function."""
import torch
from _end import graphs, seed, show
from torch import nn
from torch._dynamo.utils import counters

seed(8)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))


@torch.compile(backend="eager")
def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


for step in range(6):
    print(step, repr(train_step(torch.randn(8, 10), torch.randint(0, 3, (8,))).item()))
graphs(counters)
show(model)
