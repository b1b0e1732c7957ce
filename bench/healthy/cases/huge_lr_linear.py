"""Logistic regression on features scaled to thousandths wants a learning rate in the hundreds."""
import torch
from sklearn.datasets import make_classification

torch.manual_seed(0)
X, y = make_classification(800, 10, n_informative=6, random_state=0)
X = torch.tensor(X * 0.05, dtype=torch.float32)
y = torch.tensor(y, dtype=torch.float32)
w = torch.zeros(10, requires_grad=True)
b = torch.zeros((), requires_grad=True)
sgd = torch.optim.SGD([w, b], lr=100.0)
for it in range(120):
    z = X[:600] @ w + b
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y[:600])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
with torch.no_grad():
    acc = (((X[600:] @ w + b) > 0) == y[600:].bool()).float().mean()
print(f"{loss.item():.3f} {acc:.3f}")
