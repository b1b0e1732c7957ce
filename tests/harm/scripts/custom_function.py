import torch
from _end import seed, show
from torch import nn
from torch.autograd.function import once_differentiable

seed(23)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        ctx.mark_non_differentiable()
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * (x.abs() < 1) * ctx.slope, None


model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 4))
order = []
model[0].register_forward_hook(lambda m, a, out: order.append("forward"))
model[1].register_full_backward_hook(lambda m, gi, go: order.append("backward"))
model[0].weight.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
model[1].weight.register_hook(lambda g: g * 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(8):
    with torch.autograd.graph.save_on_cpu():
        loss = nn.functional.mse_loss(model[1](StraightThrough.apply(model[0](torch.randn(8, 6)), 0.5)), torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward(retain_graph=step % 2 == 0)
    optimizer.step()
    print(step, repr(loss.item()))
print(order)
show(model)
