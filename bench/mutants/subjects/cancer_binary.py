"""Breast cancer: one logit with BCEWithLogitsLoss, RMSprop, DataLoader, train and evaluate as functions."""
import argparse

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("seed", nargs="?", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(args.seed)

raw = load_breast_cancer()
perm = torch.randperm(len(raw.target))
features, labels = torch.from_numpy(raw.data).float()[perm], torch.from_numpy(raw.target).float()[perm]
x_train, y_train = features[:400], labels[:400]
x_val, y_val = features[400:], labels[400:]
mu, sigma = x_train.mean(dim=0), x_train.std(dim=0)
x_train = (x_train - mu) / sigma
x_val = (x_val - mu) / sigma


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(30, 24), nn.Linear(24, 24)])
        self.norm = nn.BatchNorm1d(24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.out(self.norm(x))


def train(model, loader, criterion, optimizer):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        logits = model(inputs).squeeze(1)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        logits = model(x).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, y).item()


loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)
model = Classifier()
optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(12):
    train(model, loader, criterion, optimizer)
    score = evaluate(model, x_val, y_val)
print(f"METRIC lower {score:.6f}")
