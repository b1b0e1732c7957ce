import torch
from _end import seed, show
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap

seed(13)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, x, y):
    return nn.functional.cross_entropy(functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))


for step in range(8):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    per_sample, losses = vmap(grad_and_value(loss_of), (None, 0, 0))(parameters, x, y)
    for name, p in model.named_parameters():
        p.grad = per_sample[name].mean(0)
    optimizer.step()
    print(step, [repr(v) for v in losses.tolist()])
print(jacrev(lambda a: nn.functional.mse_loss(a, torch.zeros(3), reduction="none"))(torch.ones(3)))
print(grad(grad(lambda a: nn.functional.smooth_l1_loss(a, torch.tensor(0.0))))(torch.tensor(0.3)))
show(model)
