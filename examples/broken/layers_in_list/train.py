"""Which of four nested rings does a point lie on? The deep network does no better than a shallow one: why?"""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)
ring = torch.randint(0, 4, (2000,))
angle = torch.rand(2000) * 6.2832
radius = 0.4 * (ring + 1) + 0.05 * torch.randn(2000)
points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
x_train, y_train, x_test, y_test = points[:1500], ring[:1500], points[1500:], ring[1500:]


class Deep(nn.Module):
    def __init__(self, width=10, depth=5):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.hidden = []
        for _ in range(depth):
            self.hidden.append(nn.Linear(width, width))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = F.relu(self.first(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x)


model = Deep()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(25):
    model.train()
    for batch in torch.randperm(len(x_train)).split(50):
        loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 5 == 4:
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy:.3f}")
