"""Training stops halfway, model, optimizer and scheduler are saved, and a new set of objects goes on."""
import pathlib
import tempfile

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

folder = pathlib.Path(tempfile.mkdtemp())
X, y = load_breast_cancer(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32)
X = (X - X[:400].mean(0)) / X[:400].std(0)
y = torch.tensor(y)


def build():
    model = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)


def train(model, opt, sched, first, last):
    for epoch in range(first, last):
        model.train()
        for i in torch.randperm(400).split(40):
            loss = nn.functional.cross_entropy(model(X[i]), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
    return loss.item()


torch.manual_seed(0)
model, opt, sched = build()
train(model, opt, sched, 0, 6)
torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": 6}, folder / "last.pt")

model, opt, sched = build()
state = torch.load(folder / "last.pt")
model.load_state_dict(state["model"])
opt.load_state_dict(state["opt"])
sched.load_state_dict(state["sched"])
print(train(model, opt, sched, state["epoch"], 12), sched.get_last_lr())
