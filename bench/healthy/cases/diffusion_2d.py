"""Denoising diffusion on two-dimensional blobs: the network predicts the noise, the loss hovers, samples improve."""
import torch
from sklearn.datasets import make_blobs
from torch import nn

torch.manual_seed(0)
data = torch.tensor(make_blobs(2000, centers=[[-1, -1], [1, 1], [-1, 1]], cluster_std=0.15, random_state=0)[0], dtype=torch.float32)
T = 50
betas = torch.linspace(1e-4, 0.1, T)
abar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], -1))


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(300):
    x0 = data[torch.randint(len(data), (128,))]
    t = torch.randint(T, (128,))
    eps = torch.randn_like(x0)
    xt = abar[t].sqrt()[:, None] * x0 + (1 - abar[t]).sqrt()[:, None] * eps
    loss = (model(xt, t) - eps).pow(2).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
model.eval()
x = torch.randn(200, 2)
with torch.no_grad():
    for k in reversed(range(T)):
        e = model(x, torch.full((200,), k))
        x = (x - betas[k] / (1 - abar[k]).sqrt() * e) / (1 - betas[k]).sqrt()
        if k:
            x = x + betas[k].sqrt() * torch.randn_like(x)
print("distance to data", torch.cdist(x, data).min(1).values.mean().item())
