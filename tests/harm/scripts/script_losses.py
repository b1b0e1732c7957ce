import warnings

import torch
import torch.nn.functional as F
from _end import seed, show
from torch import Tensor, nn

warnings.simplefilter("ignore", DeprecationWarning)
seed(10)


@torch.jit.script
def many(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    logp = F.log_softmax(x, dim=1)
    return (F.cross_entropy(x, y) + F.nll_loss(logp, y) + F.mse_loss(x, t) + F.l1_loss(x, t) + F.smooth_l1_loss(x, t)
            + F.huber_loss(x, t) + F.kl_div(logp, t.softmax(1), reduction="batchmean")
            + F.binary_cross_entropy_with_logits(x, t.sigmoid()) + F.binary_cross_entropy(x.sigmoid(), t.sigmoid())
            + F.cosine_embedding_loss(x, t, torch.ones(x.size(0))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self.layers(x), y)


net = torch.jit.script(Net())
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(8):
    x, y, t = torch.randn(8, 6), torch.randint(0, 4, (8,)), torch.randn(8, 4)
    loss = net(x, y) + many(net.layers(x), y, t)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
print(many.code)
show(net)
