import torch
from _end import seed, show
from torch import nn

seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
c_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
criterion = nn.BCEWithLogitsLoss()
for step in range(30):
    real = torch.randn(16, 2) * 0.5 + 1
    fake = generator(torch.randn(16, 4))
    c_loss = criterion(critic(real), torch.ones(16, 1)) + criterion(critic(fake.detach()), torch.zeros(16, 1))
    alpha = torch.rand(16, 1)
    between = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_()
    slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    c_loss = c_loss + ((slope.norm(dim=1) - 1) ** 2).mean()
    c_opt.zero_grad()
    c_loss.backward()
    c_opt.step()
    g_loss = criterion(critic(fake), torch.ones(16, 1))
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    print(step, repr(c_loss.item()), repr(g_loss.item()))
show(generator, critic)
