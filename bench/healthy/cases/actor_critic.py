"""Advantage actor-critic on a batch of bandit-like games with entropy bonus; one network, two heads."""
import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self, obs=5, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.Tanh())
        self.pi = nn.Linear(48, actions)
        self.v = nn.Linear(48, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def play(obs, actions):
    best = obs[:, :3].argmax(1)
    return (actions == best).float() + 0.1 * torch.randn(len(obs))


def main(updates=150):
    torch.manual_seed(2)
    ac = ActorCritic()
    opt = torch.optim.RMSprop(ac.parameters(), lr=3e-3)
    for u in range(updates):
        obs = torch.randn(64, 5)
        dist, value = ac(obs)
        act = dist.sample()
        reward = play(obs, act)
        adv = reward - value.detach()
        loss = -(dist.log_prob(act) * adv).mean() + 0.5 * (reward - value).pow(2).mean() - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        opt.step()
    print("mean reward", reward.mean().item())


main()
