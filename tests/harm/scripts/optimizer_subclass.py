import torch
from _end import seed, show
from torch import nn

seed(22)


class Lookahead(torch.optim.AdamW):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.calls = 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure=None):
        result = super().step(closure)
        self.calls += 1
        if self.calls % 3 == 0:
            for slow, p in zip(self.slow, [p for g in self.param_groups for p in g["params"]], strict=True):
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)
        return result


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


one, two = nn.Linear(6, 8), nn.Linear(8, 4)
optimizers = [Lookahead(one.parameters(), 1e-2), Signs(two.parameters(), 1e-3)]
fired = []
optimizers[0].register_step_post_hook(lambda *_: fired.append(1))
for step in range(10):
    loss = nn.functional.mse_loss(two(one(torch.randn(8, 6)).relu()), torch.randn(8, 4))
    for o in optimizers:
        o.zero_grad()
    loss.backward()
    for o in optimizers:
        o.step()
    print(step, repr(loss.item()))
print("own hook", len(fired), optimizers[0].calls)
show(one, two)
