import torch
from _end import seed, show
from torch import nn
from torch.nn.utils import parametrizations, prune, stateless  # noqa: F401

seed(26)
model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ELU(),
                      parametrizations.spectral_norm(nn.Linear(8, 8)), nn.LazyLinear(4))
model(torch.randn(2, 6))
prune.l1_unstructured(model[3], "weight", amount=0.3)
with nn.utils.parametrize.cached():
    print(model[0].weight.shape)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(10):
    loss = nn.functional.mse_loss(model(torch.randn(8, 6)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
prune.remove(model[3], "weight")
nn.utils.parametrize.remove_parametrizations(model[0], "weight")
show(model)
