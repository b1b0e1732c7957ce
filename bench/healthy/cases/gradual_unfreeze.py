"""Fine-tuning in stages: the head first, then the trunk joins the optimizer with a smaller rate."""
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
decoder = nn.Linear(32, 64)
opt = torch.optim.Adam([*trunk.parameters(), *decoder.parameters()], lr=2e-3)
for step in range(150):
    b = X[torch.randint(len(X), (64,))]
    loss = nn.functional.mse_loss(decoder(trunk(b)), b)
    opt.zero_grad()
    loss.backward()
    opt.step()

head = nn.Linear(32, 10)
model = nn.Sequential(trunk, head)
trunk.requires_grad_(False)
opt = torch.optim.Adam(head.parameters(), lr=3e-3)


def epoch():
    for i in torch.randperm(1400).split(50):
        loss = nn.functional.cross_entropy(model(X[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = (model(X[1400:]).argmax(1) == y[1400:]).float().mean().item()
    model.train()
    return acc


print("head", [round(epoch(), 3) for _ in range(3)])
trunk.requires_grad_(True)
opt.add_param_group({"params": trunk.parameters(), "lr": 3e-4})
print("all", [round(epoch(), 3) for _ in range(3)])
