"""No modules at all: weights in a dictionary, a hand-written SGD update under no_grad."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris

torch.manual_seed(0)
data = load_iris()
x = torch.tensor(data.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(data.target)
params = {"w1": torch.randn(4, 16) * 0.5, "b1": torch.zeros(16), "w2": torch.randn(16, 3) * 0.25, "b2": torch.zeros(3)}
for p in params.values():
    p.requires_grad_()


def forward(p, x):
    return torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


for step in range(300):
    i = torch.randint(len(x), (25,))
    loss = F.cross_entropy(forward(params, x[i]), y[i])
    grads = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        for p, g in zip(params.values(), grads):
            p -= 0.1 * g
print(loss.item())
