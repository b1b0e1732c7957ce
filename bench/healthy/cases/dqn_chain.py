"""Deep Q-learning with a replay buffer and a target network copied every 50 updates."""
import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

random.seed(0)
torch.manual_seed(0)
N = 8


def onehot(i):
    v = torch.zeros(N)
    v[i] = 1
    return v


q = nn.Sequential(nn.Linear(N, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(q)
target.requires_grad_(False)
opt = torch.optim.Adam(q.parameters(), lr=2e-3)
memory = deque(maxlen=2000)
pos, updates = 0, 0
for step in range(900):
    eps = max(0.1, 1 - step / 500)
    if random.random() < eps:
        act = random.randrange(2)
    else:
        with torch.no_grad():
            act = int(q(onehot(pos)).argmax())
    nxt = min(N - 1, pos + 1) if act else max(0, pos - 1)
    reward, done = (1.0, True) if nxt == N - 1 else (0.0, False)
    memory.append((onehot(pos), act, reward, onehot(nxt), done))
    pos = 0 if done else nxt
    if len(memory) >= 64 and step % 2 == 0:
        s, a, r, s2, d = zip(*random.sample(memory, 32))
        s, s2 = torch.stack(s), torch.stack(s2)
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d, dtype=torch.float32)
        with torch.no_grad():
            y = r + 0.95 * (1 - d) * target(s2).max(1).values
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        updates += 1
        if updates % 50 == 0:
            target.load_state_dict(q.state_dict())
print(updates, loss.item())
