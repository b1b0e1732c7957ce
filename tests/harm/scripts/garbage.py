"""What the user lets go of is freed: activations and losses before long (a sampled step may be held for a moment), models,
optimizers and loaders when their function ends."""
import gc
import weakref

import torch
from _end import seed, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed(32)
gc.disable()


def train(keep):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(64, 6), torch.randn(64, 4)), batch_size=8)
    freed = []
    for x, y in loader:
        hidden = model[0](x)
        out = model[2](model[1](hidden))
        loss = nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
        refs = [weakref.ref(t) for t in (hidden, out, loss)]
        del hidden, out, loss
        freed.append(refs)
    print([[r() is None for r in refs] for refs in freed[:-2]])
    keep.append(weakref.ref(optimizer))
    keep.append(weakref.ref(loader))
    keep.extend(weakref.ref(m) for m in model.modules())
    return model


refs = []
last = [train(refs) for _ in range(3)][-1]
gc.collect()
print("alive", sum(r() is not None for r in refs), "of", len(refs))
show(last)
