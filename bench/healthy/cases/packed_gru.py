"""Sequences of different length through a GRU with packing: is the sum of the marked steps positive?"""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Marked(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            n = int(torch.randint(5, 20, (1,), generator=g))
            seq = torch.randn(n, 2, generator=g)
            seq[:, 1] = (torch.rand(n, generator=g) < 0.4).float()
            self.items.append((seq, float((seq[:, 0] * seq[:, 1]).sum() > 0)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    seqs, ys = zip(*batch)
    return pad_sequence(seqs, batch_first=True), torch.tensor([len(s) for s in seqs]), torch.tensor(ys)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.head(last[-1]).squeeze(-1)


torch.manual_seed(0)
loader = DataLoader(Marked(800, 0), 32, shuffle=True, collate_fn=collate)
held_out = DataLoader(Marked(200, 1), 200, collate_fn=collate)
net = Reader()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
bce = nn.BCEWithLogitsLoss()
for epoch in range(5):
    net.train()
    for x, n, y in loader:
        opt.zero_grad()
        bce(net(x, n), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
    net.eval()
    with torch.no_grad():
        x, n, y = next(iter(held_out))
        print(epoch, ((net(x, n) > 0) == y.bool()).float().mean().item())
