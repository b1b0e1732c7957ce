"""Multi-label classification with per-label positive weights and micro F1."""
import torch
from sklearn.datasets import make_multilabel_classification
from torch import nn

torch.manual_seed(0)
X, Y = make_multilabel_classification(1500, 20, n_classes=6, n_labels=2, random_state=0)
X, Y = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
Xtr, Xte, Ytr, Yte = X[:1200], X[1200:], Y[:1200], Y[1200:]
m, s = Xtr.mean(0), Xtr.std(0) + 1e-6
Xtr, Xte = (Xtr - m) / s, (Xte - m) / s
pos_weight = (1 - Ytr.mean(0)) / Ytr.mean(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 6))
criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(8):
    model.train()
    for i in torch.randperm(len(Xtr)).split(50):
        optimizer.zero_grad()
        loss = criterion(model(Xtr[i]), Ytr[i])
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    P = (model(Xte) > 0).float()
    print("micro f1", (2 * (P * Yte).sum() / (P.sum() + Yte.sum())).item())
