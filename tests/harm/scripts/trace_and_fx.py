import warnings

import torch
from _end import seed, show
from torch import fx, nn

warnings.simplefilter("ignore", DeprecationWarning)
seed(11)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, x, t):
        return nn.functional.mse_loss(self.layers(x), t)


net = Net()
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
symbolic = fx.symbolic_trace(net)
print(symbolic.code)
traced = torch.jit.trace(net, (torch.randn(8, 6), torch.randn(8, 4)))
print(traced.code)
for step in range(8):
    x, t = torch.randn(8, 6), torch.randn(8, 4)
    loss = traced(x, t) + symbolic(x, t)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
show(net)
