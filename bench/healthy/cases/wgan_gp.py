"""Wasserstein GAN with gradient penalty on a two-moons density; five critic steps for each of the generator."""
import torch
from sklearn.datasets import make_moons
from torch import autograd, nn, optim


def mlp(i, o, h=48):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class WGAN:
    def __init__(self, data, latent=6, lam=10.0):
        self.data, self.latent, self.lam = data, latent, lam
        self.gen, self.critic = mlp(latent, 2), mlp(2, 1)
        self.og = optim.Adam(self.gen.parameters(), 5e-4, betas=(0.0, 0.9))
        self.oc = optim.Adam(self.critic.parameters(), 5e-4, betas=(0.0, 0.9))

    def sample(self, n):
        return self.gen(torch.randn(n, self.latent))

    def penalty(self, a, b):
        t = torch.rand(len(a), 1)
        mid = (t * a + (1 - t) * b).requires_grad_(True)
        (g,) = autograd.grad(self.critic(mid).sum(), mid, create_graph=True)
        return ((g.norm(2, dim=1) - 1) ** 2).mean()

    def critic_step(self, n=64):
        real = self.data[torch.randint(len(self.data), (n,))]
        with torch.no_grad():
            fake = self.sample(n)
        loss = self.critic(fake).mean() - self.critic(real).mean() + self.lam * self.penalty(real, fake)
        self.oc.zero_grad()
        loss.backward()
        self.oc.step()
        return loss.item()

    def generator_step(self, n=64):
        loss = -self.critic(self.sample(n)).mean()
        self.og.zero_grad()
        loss.backward()
        self.og.step()
        return loss.item()


torch.manual_seed(0)
points, _ = make_moons(2000, noise=0.05, random_state=0)
points = torch.tensor((points - points.mean(0)) / points.std(0), dtype=torch.float32)
gan = WGAN(points)
for it in range(60):
    for _ in range(5):
        c = gan.critic_step()
    g = gan.generator_step()
print(round(c, 3), round(g, 3))
