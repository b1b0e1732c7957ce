"""Argument: 0, fork, spawn or forkserver."""
import random
import sys

import numpy as np
import torch
from _end import seed, show
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.randn(6) + i, torch.tensor(float(i)) + random.random() + np.random.rand()


def main(how):
    seed(2)
    workers = {} if how == "0" else {"num_workers": 2, "multiprocessing_context": how, "persistent_workers": True}
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True, **workers)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(epoch, repr(loss.item()), x.shape)
    show(model)


if __name__ == "__main__":
    main(sys.argv[1])
