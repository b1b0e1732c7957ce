"""Hyperparameters of a Gaussian process by gradient descent on the marginal likelihood, in double precision."""
import math

import torch

torch.manual_seed(0)
x = torch.linspace(0, 6, 60, dtype=torch.float64)
y = torch.sin(x) + 0.1 * torch.randn(60, dtype=torch.float64)
log_params = torch.zeros(3, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.Adam([log_params], lr=0.05)


def nll():
    length, signal, noise = log_params.exp()
    k = signal ** 2 * torch.exp(-0.5 * ((x[:, None] - x[None]) / length) ** 2) + (noise ** 2 + 1e-6) * torch.eye(60, dtype=torch.float64)
    chol = torch.linalg.cholesky(k)
    alpha = torch.cholesky_solve(y[:, None], chol)
    return 0.5 * (y @ alpha).squeeze() + chol.diagonal().log().sum() + 30 * math.log(2 * math.pi)


for i in range(150):
    optimizer.zero_grad()
    loss = nll()
    loss.backward()
    optimizer.step()
print(loss.item(), log_params.exp().tolist())
