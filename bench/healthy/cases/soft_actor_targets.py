"""Twin critics with Polyak-averaged targets on a one-step control problem (TD3-like, delayed actor)."""
import copy

import torch
from torch import nn

torch.manual_seed(0)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, o))


actor, q1, q2 = nn.Sequential(mlp(3, 1), nn.Tanh()), mlp(4, 1), mlp(4, 1)
actor_t, q1_t, q2_t = (copy.deepcopy(m).requires_grad_(False) for m in (actor, q1, q2))
opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_q = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=2e-3)


def env(s, a):
    nxt = 0.9 * s + 0.1 * torch.randn_like(s)
    nxt[:, 0] += 0.3 * a[:, 0]
    return nxt, -(s[:, :1] + a).pow(2)


def polyak(target, source, tau=0.02):
    with torch.no_grad():
        for p, q in zip(target.parameters(), source.parameters()):
            p.lerp_(q, tau)


s = torch.randn(64, 3)
for step in range(200):
    with torch.no_grad():
        a = (actor(s) + 0.2 * torch.randn(64, 1)).clamp(-1, 1)
        s2, r = env(s, a)
        a2 = actor_t(s2)
        y = r + 0.9 * torch.minimum(q1_t(torch.cat([s2, a2], 1)), q2_t(torch.cat([s2, a2], 1)))
    sa = torch.cat([s, a], 1)
    loss_q = (q1(sa) - y).pow(2).mean() + (q2(sa) - y).pow(2).mean()
    opt_q.zero_grad()
    loss_q.backward()
    opt_q.step()
    if step % 2 == 0:
        loss_a = -q1(torch.cat([s, actor(s)], 1)).mean()
        opt_a.zero_grad()
        loss_a.backward()
        opt_a.step()
        for t, m in ((actor_t, actor), (q1_t, q1), (q2_t, q2)):
            polyak(t, m)
    s = s2
print(loss_q.item(), r.mean().item())
