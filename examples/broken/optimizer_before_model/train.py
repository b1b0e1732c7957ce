"""Digits again: the head is exchanged for one with ten outputs. Half of the network never learns: which, and why?"""
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(3)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, test = random_split(data, [1300, 497])
train_loader = DataLoader(train, batch_size=50, shuffle=True)
x_test, y_test = test[:]


class Classifier(nn.Module):
    def __init__(self, classes=1000):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.head(self.body(x))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model.head = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()

for epoch in range(15):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.3f}")
