"""Tumours, benign or malignant, tested one patient at a time. Training looks perfect, the test does not: why?"""
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
x, y = load_breast_cancer(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.3, stratify=y, random_state=2)
scaler = StandardScaler().fit(x_train)


def loader(x, y, batch_size, shuffle):
    data = TensorDataset(torch.tensor(scaler.transform(x), dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
    return DataLoader(data, batch_size, shuffle=shuffle, drop_last=shuffle)


def evaluate(net, batches):
    net.eval()
    right = seen = 0
    for x, y in batches:
        with torch.no_grad():
            right += ((net(x).squeeze(1) > 0) == (y > 0.5)).sum().item()
        seen += len(y)
    return right / seen


train, test = loader(x_train, y_train, 32, True), loader(x_test, y_test, 4, False)
net = nn.Sequential(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

for epoch in range(15):
    net.train()
    for x, y in train:
        loss = criterion(net(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {evaluate(net, test):.3f}")
