"""A convolutional autoencoder of the digits: Adam, MSE on pixels."""
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
pixels = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
pixels = pixels[torch.randperm(len(pixels))]
x_train, x_val = pixels[:1400], pixels[1400:]


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(192, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 192), nn.ReLU(), nn.Unflatten(1, (12, 4, 4)),
                                     nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code)


train_loader = DataLoader(TensorDataset(x_train), batch_size=70, shuffle=True)
model = AutoEncoder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loss_fn = nn.MSELoss()
for epoch in range(12):
    model.train()
    for (images,) in train_loader:
        loss = loss_fn(model(images), images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        error = loss_fn(model(x_val), x_val).item()
print(f"METRIC lower {error:.6f}")
