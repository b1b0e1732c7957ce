"""Cox partial likelihood with censoring; the risk set is formed in each full batch."""
import torch
from torch import nn

torch.manual_seed(0)
n = 600
x = torch.randn(n, 5)
risk = 0.9 * x[:, 0] - 0.6 * x[:, 1]
time = -torch.log(torch.rand(n)) / torch.exp(risk)
censor = torch.rand(n) * 3
event = (time <= censor).float()
time = torch.minimum(time, censor)


def cox_loss(score, time, event):
    order = torch.argsort(time, descending=True)
    score, event = score[order], event[order]
    return -((score - torch.logcumsumexp(score, 0)) * event).sum() / event.sum()


@torch.no_grad()
def concordance(score, time, event):
    later = (time[:, None] < time[None, :]) & event[:, None].bool()
    return (score[:, None] > score[None, :])[later].float().mean().item()


net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=1e-2)
tr, te = slice(0, 450), slice(450, n)
for step in range(120):
    net.train()
    loss = cox_loss(net(x[tr]).squeeze(1), time[tr], event[tr])
    opt.zero_grad()
    loss.backward()
    opt.step()
net.eval()
with torch.no_grad():
    print("concordance", concordance(net(x[te]).squeeze(1), time[te], event[te]))
