"""No modules and no optimizer object: weights in a dictionary and a hand-written momentum update under no_grad."""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris

torch.manual_seed(0)
data = load_iris()
x = torch.tensor(data.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(data.target)
params = {"w1": torch.randn(4, 16) * 0.5, "b1": torch.zeros(16), "w2": torch.randn(16, 3) * 0.25, "b2": torch.zeros(3)}
speed = {k: torch.zeros_like(p) for k, p in params.items()}
for p in params.values():
    p.requires_grad_()


def forward(p, x):
    return torch.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


for step in range(300):
    i = torch.randint(len(x), (25,))
    loss = F.cross_entropy(forward(params, x[i]), y[i])
    loss.backward()
    with torch.no_grad():
        for k, p in params.items():
            speed[k].mul_(0.9).add_(p.grad)
            p -= 0.03 * speed[k]
            p.grad = None
print(loss.item())
