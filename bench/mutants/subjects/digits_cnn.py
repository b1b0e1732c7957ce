"""A small convolutional network with batch norm in a Trainer class: Adam, step decay per epoch."""
import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.pool(torch.relu(self.bn2(self.conv2(x))))
        return self.head(self.drop(x.flatten(1)))


class Trainer:
    def __init__(self, model, optimizer, scheduler, data):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.x_train, self.y_train, self.x_val, self.y_val = data
        self.criterion = nn.CrossEntropyLoss()

    def train_epoch(self):
        self.model.train()
        for index in torch.randperm(len(self.x_train)).split(50):
            outputs = self.model(self.x_train[index])
            loss = self.criterion(outputs, self.y_train[index])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            return (self.model(self.x_val).argmax(dim=1) == self.y_val).float().mean().item()

    def fit(self, epochs):
        for _ in range(epochs):
            self.train_epoch()
            score = self.evaluate()
            self.scheduler.step()
        return score


digits = load_digits()
images = digits.images.astype("float32") / 16 - 0.3
a, b, c, d = train_test_split(images, digits.target, test_size=500, random_state=SEED)
x_train, y_train = torch.tensor(a)[:, None], torch.tensor(c)
x_val, y_val = torch.tensor(b)[:, None], torch.tensor(d)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
trainer = Trainer(model, optimizer, scheduler, (x_train, y_train, x_val, y_val))
print(f"METRIC higher {trainer.fit(8):.6f}")
