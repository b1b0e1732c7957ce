"""Which of four motifs does a noisy sequence hold? A GRU with clipping."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
motifs = torch.randn(4, 6, 3) * 1.5


def make(n):
    y = torch.randint(0, 4, (n,))
    x = torch.randn(n, 20, 3) * 0.6
    start = torch.randint(0, 14, (n,))
    for i in range(n):
        x[i, start[i]:start[i] + 6] += motifs[y[i]]
    return x, y


x_train, y_train = make(900)
x_val, y_val = make(300)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.fc(self.drop(states[:, -1]))


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(10):
    model.train()
    for idx in torch.randperm(len(x_train)).split(45):
        logits = model(x_train[idx])
        loss = F.cross_entropy(logits, y_train[idx])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = F.cross_entropy(model(x_val), y_val).item()
print(f"METRIC lower {val_loss:.6f}")
