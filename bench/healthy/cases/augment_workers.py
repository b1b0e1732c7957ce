"""Random augmentation in the data set, two loader workers seeded one by one, validation without augmentation."""
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        if self.augment:
            img = np.roll(img, np.random.randint(-1, 2), axis=np.random.randint(2))
            img = img + 0.05 * np.random.randn(*img.shape)
        return torch.tensor(img, dtype=torch.float32)[None], int(self.labels[i])


def seed_worker(_):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    torch.manual_seed(0)
    d = load_digits()
    images = d.images / 16
    order = np.random.default_rng(0).permutation(len(images))
    tr, va = order[:1400], order[1400:]
    train = DataLoader(Digits(images[tr], d.target[tr], True), 50, shuffle=True, num_workers=2, worker_init_fn=seed_worker, persistent_workers=True)
    val = DataLoader(Digits(images[va], d.target[va], False), 200)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(3):
        net.train()
        for x, y in train:
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        net.eval()
        hits = total = 0
        with torch.no_grad():
            for x, y in val:
                hits += (net(x).argmax(1) == y).sum().item()
                total += len(y)
        print(epoch, hits / total)


if __name__ == "__main__":
    main()
