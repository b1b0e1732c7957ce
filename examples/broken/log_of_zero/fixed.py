"""Is it anything but a zero? Binary cross-entropy, written out by hand. It learns, and then every loss is nan: why?"""
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 8 - 1, dtype=torch.float32)
y = torch.tensor(labels != 0, dtype=torch.float32)
loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=40, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 128)
        self.output = nn.Linear(128, 1)

    def forward(self, x):
        return self.output(torch.relu(self.hidden(x))).squeeze(1)


def cross_entropy(score, y):
    return nn.functional.binary_cross_entropy_with_logits(score, y)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for epoch in range(8):
    net.train()
    for xb, yb in loader:
        loss = cross_entropy(net(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        accuracy = ((net(x[1400:]) > 0) == (y[1400:] > 0.5)).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.6f}, test accuracy {accuracy:.3f}")
