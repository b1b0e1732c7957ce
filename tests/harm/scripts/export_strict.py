"""torch.export, strict and not, before and after training, with a loss inside."""
import torch
from _end import seed, show
from torch import nn

seed(12)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


net = Net()
example = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
print(torch.export.export(net, example, strict=True).graph)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(6):
    loss = net(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
program = torch.export.export(net, example, strict=False)
print(program.graph, repr(program.module()(*example).item()))
show(net)
