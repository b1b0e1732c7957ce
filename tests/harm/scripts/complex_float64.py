import torch
from _end import seed, show
from torch import nn

seed(24)
torch.set_default_dtype(torch.float64)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(9, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.kernel, n=16) * self.scale


model = Spectral()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(4, 16)
    loss = (model(x) - x.roll(3, 1)).abs().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
show(model)
