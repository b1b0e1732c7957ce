import torch
from _end import graphs, seed, show
from torch import nn
from torch._dynamo.utils import counters

seed(9)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))
step_compiled = torch.compile(optimizer.step, backend="eager")
for step in range(6):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 10)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    step_compiled()
    print(step, repr(loss.item()))
graphs(counters)
show(model)
