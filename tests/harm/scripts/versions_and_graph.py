"""In-place counters, grad_fn names, hooks and the storage of gradients are the user's own."""
import torch
from _end import seed, show
from torch import nn

seed(31)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def chain(fn):
    names = []
    while fn is not None:
        names.append(fn.name())
        fn = next((f for f, _ in fn.next_functions if f is not None), None)
    return names


for step in range(6):
    x = torch.randn(8, 6)
    out = model(x)
    out.add_(1)
    loss = nn.functional.mse_loss(out, torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    pointers = [p.grad.data_ptr() for p in model.parameters()]
    optimizer.step()
    print(step, repr(loss.item()), chain(loss.grad_fn), x._version, out._version, loss._version,
          [p._version for p in model.parameters()], [p.grad._version for p in model.parameters()],
          pointers == [p.grad.data_ptr() for p in model.parameters()], loss.retains_grad, out.retains_grad, out._backward_hooks,
          [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()])
show(model)
