"""Two-layer graph convolution on a stochastic block model with a normalised adjacency; masks for training and test nodes."""
import torch
import torch.nn.functional as F
from torch import nn


class GCN(nn.Module):
    def __init__(self, d, h, c):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, h), nn.Linear(h, c)

    def forward(self, x, a):
        x = F.relu(a @ self.w1(x))
        x = F.dropout(x, 0.5, training=self.training)
        return a @ self.w2(x)


torch.manual_seed(0)
n, blocks = 240, 3
label = torch.arange(n) % blocks
prob = torch.where(label[:, None] == label[None, :], 0.12, 0.01)
upper = torch.triu(torch.bernoulli(prob), 1)
A = upper + upper.T + torch.eye(n)
d = A.sum(1).rsqrt()
A = d[:, None] * A * d[None, :]
X = F.one_hot(label, blocks).float() * 0.5 + torch.randn(n, blocks)
X = torch.cat([X, torch.randn(n, 5)], 1)
train = torch.zeros(n, dtype=torch.bool)
train[torch.randperm(n)[:60]] = True
net = GCN(8, 16, blocks)
opt = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=5e-4)
for epoch in range(100):
    net.train()
    opt.zero_grad()
    F.cross_entropy(net(X, A)[train], label[train]).backward()
    opt.step()
net.eval()
with torch.no_grad():
    print((net(X, A)[~train].argmax(1) == label[~train]).float().mean().item())
