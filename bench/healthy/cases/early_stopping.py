"""Early stopping on validation loss with patience; the best state is copied and restored."""
import copy

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn


class EarlyStopping:
    def __init__(self, patience=6):
        self.patience, self.best, self.bad, self.state = patience, float("inf"), 0, None

    def __call__(self, value, model):
        if value < self.best - 1e-4:
            self.best, self.bad, self.state = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


torch.manual_seed(0)
X, y = load_diabetes(return_X_y=True)
X_tr, X_va, y_tr, y_va = train_test_split(X, y, test_size=0.3, random_state=0)
mu, sd = y_tr.mean(), y_tr.std()
X_tr, X_va = (torch.tensor(a / 0.0476, dtype=torch.float32) for a in (X_tr, X_va))
y_tr, y_va = (torch.tensor((a - mu) / sd, dtype=torch.float32).view(-1, 1) for a in (y_tr, y_va))
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-3)
stopper = EarlyStopping()
for epoch in range(100):
    model.train()
    for i in torch.randperm(len(X_tr)).split(32):
        opt.zero_grad()
        nn.functional.mse_loss(model(X_tr[i]), y_tr[i]).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        v = nn.functional.mse_loss(model(X_va), y_va).item()
    if stopper(v, model):
        break
model.load_state_dict(stopper.state)
print(epoch, stopper.best)
