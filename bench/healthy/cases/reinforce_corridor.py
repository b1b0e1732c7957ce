"""REINFORCE with a running baseline in a corridor; the loss says little, the return rises."""
import torch
from torch import nn
from torch.distributions import Categorical


class Corridor:
    def __init__(self, length=6):
        self.length = length

    def reset(self):
        self.at, self.t = 0, 0
        return self.state()

    def state(self):
        return nn.functional.one_hot(torch.tensor(self.at), self.length).float()

    def step(self, action):
        self.at = max(0, min(self.length - 1, self.at + (1 if action else -1)))
        self.t += 1
        done = self.at == self.length - 1 or self.t >= 30
        return self.state(), (1.0 if self.at == self.length - 1 else -0.05), done


torch.manual_seed(0)
env = Corridor()
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
baseline = 0.0
for episode in range(120):
    s, logs, rewards, done = env.reset(), [], [], False
    while not done:
        dist = Categorical(logits=policy(s))
        a = dist.sample()
        logs.append(dist.log_prob(a))
        s, r, done = env.step(a.item())
        rewards.append(r)
    returns, g = [], 0.0
    for r in reversed(rewards):
        g = r + 0.98 * g
        returns.insert(0, g)
    returns = torch.tensor(returns)
    baseline = 0.9 * baseline + 0.1 * returns[0].item()
    loss = -(torch.stack(logs) * (returns - baseline)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("last return", returns[0].item())
