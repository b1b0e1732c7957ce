"""Matrix factorisation with the BPR loss; sparse embeddings and SparseAdam."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
USERS, ITEMS, K = 120, 80, 3
taste_u, taste_i = torch.randn(USERS, K), torch.randn(ITEMS, K)
likes = (taste_u @ taste_i.T + 0.5 * torch.randn(USERS, ITEMS)) > 1.0
pairs = likes.nonzero()
held = torch.rand(len(pairs)) < 0.1
train_pairs, test_pairs = pairs[~held], pairs[held]


class MF(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.u = nn.Embedding(USERS, d, sparse=True)
        self.i = nn.Embedding(ITEMS, d, sparse=True)
        nn.init.normal_(self.u.weight, std=0.1)
        nn.init.normal_(self.i.weight, std=0.1)

    def score(self, u, i):
        return (self.u(u) * self.i(i)).sum(-1)


mf = MF()
opt = torch.optim.SparseAdam(list(mf.parameters()), lr=2e-2)
for epoch in range(6):
    for b in train_pairs[torch.randperm(len(train_pairs))].split(128):
        user, pos = b[:, 0], b[:, 1]
        neg = torch.randint(ITEMS, (len(b),))
        loss = -F.logsigmoid(mf.score(user, pos) - mf.score(user, neg)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
with torch.no_grad():
    neg = torch.randint(ITEMS, (len(test_pairs),))
    print("pairs ranked right", (mf.score(test_pairs[:, 0], test_pairs[:, 1]) > mf.score(test_pairs[:, 0], neg)).float().mean().item())
