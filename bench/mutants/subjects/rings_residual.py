"""Three interleaved rings with a residual MLP: AdamW, rate cut on plateau."""
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
rng = np.random.default_rng(seed)


def rings(n):
    label = rng.integers(0, 3, n)
    angle = rng.uniform(0, 2 * np.pi, n)
    radius = label + 1 + rng.normal(0, 0.18, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), rng.normal(size=n)], 1)
    return torch.tensor(points, dtype=torch.float32), torch.tensor(label)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, depth=4):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


x_train, y_train = rings(1200)
x_val, y_val = rings(400)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=60, shuffle=True)
for epoch in range(12):
    model.train()
    for points, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(points), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = criterion(model(x_val), y_val)
    scheduler.step(val_loss)
print(f"METRIC lower {val_loss.item():.6f}")
