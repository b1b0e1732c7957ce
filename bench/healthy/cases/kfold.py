"""Five-fold cross-validation: a fresh model, optimizer and scaler for every fold."""
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import nn

X, y = load_breast_cancer(return_X_y=True)
scores = []
for fold, (tr, te) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(X, y)):
    torch.manual_seed(fold)
    sc = StandardScaler().fit(X[tr])
    xa, ya = torch.from_numpy(sc.transform(X[tr])).float(), torch.from_numpy(y[tr])
    xb, yb = torch.from_numpy(sc.transform(X[te])).float(), torch.from_numpy(y[te])
    clf = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.Adam(clf.parameters(), lr=5e-3)
    for epoch in range(6):
        clf.train()
        for idx in torch.randperm(len(xa)).split(64):
            opt.zero_grad()
            nn.functional.cross_entropy(clf(xa[idx]), ya[idx]).backward()
            opt.step()
    clf.eval()
    with torch.no_grad():
        scores.append((clf(xb).argmax(1) == yb).float().mean().item())
print(np.round(scores, 3), np.mean(scores))
