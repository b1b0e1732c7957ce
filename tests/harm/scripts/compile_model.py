"""Arguments: backend, fullgraph or breaks. Prints how often Dynamo broke the graph."""
import sys

import torch
import torch._dynamo
from _end import seed, show
from torch import nn
from torch._dynamo.utils import counters

seed(7)
backend, how = sys.argv[1:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(10, 16), nn.Linear(16, 3), nn.Dropout(0.1)

    def forward(self, x, y):
        h = torch.relu(self.a(x))
        if how == "breaks":
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.b(self.drop(h)), y)


net = Net()
compiled = torch.compile(net, backend=backend, fullgraph=how == "fullgraph")
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(6):
    loss = compiled(torch.randn(8, 10), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
with torch.no_grad():
    print("no_grad", repr(compiled.eval()(torch.randn(8, 10), torch.randint(0, 3, (8,))).item()))
print("graph breaks", sorted(counters["graph_break"].items()))
print("frames", dict(counters["frames"]), "graphs", counters["stats"]["unique_graphs"], "calls", counters["stats"]["calls_captured"])
show(net)
