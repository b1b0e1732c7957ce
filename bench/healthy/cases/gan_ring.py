"""Plain GAN on points of a ring: two optimizers, fakes detached for the discriminator."""
import math

import torch
import torch.nn as nn

torch.manual_seed(5)
G = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
adversarial = nn.BCEWithLogitsLoss()


def real(n):
    a = torch.rand(n) * 2 * math.pi
    return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2)


ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
for step in range(400):
    z = torch.randn(64, 4)
    fake = G(z)
    opt_d.zero_grad()
    d_loss = adversarial(D(real(64)), ones) + adversarial(D(fake.detach()), zeros)
    d_loss.backward()
    opt_d.step()

    opt_g.zero_grad()
    g_loss = adversarial(D(fake), ones)
    g_loss.backward()
    opt_g.step()
with torch.no_grad():
    print("mean radius", G(torch.randn(500, 4)).norm(dim=1).mean().item())
