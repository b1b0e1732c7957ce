"""A rare class with a weighted sampler, judged by balanced accuracy."""
import torch
from sklearn.datasets import make_classification
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(0)
X, y = make_classification(3000, 12, n_informative=6, weights=[0.93], class_sep=1.5, random_state=1)
a, b, ya, yb = train_test_split(X, y, stratify=y, random_state=0)
a, b = torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
ya = torch.tensor(ya)
weights = (1.0 / torch.bincount(ya))[ya]
loader = DataLoader(TensorDataset(a, ya), batch_size=64, sampler=WeightedRandomSampler(weights, len(ya)))
clf = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(clf.parameters(), lr=2e-3)
for epoch in range(6):
    clf.train()
    for x, t in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(clf(x), t).backward()
        opt.step()
    clf.eval()
    with torch.no_grad():
        print(epoch, balanced_accuracy_score(yb, clf(b).argmax(1).numpy()))
