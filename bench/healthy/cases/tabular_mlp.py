"""Breast cancer with a small MLP, scaler fitted on the training rows only, validation after every epoch."""
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data, labels = load_breast_cancer(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(data, labels, test_size=0.25, stratify=labels, random_state=0)
scaler = StandardScaler().fit(x_train)
train = TensorDataset(torch.tensor(scaler.transform(x_train), dtype=torch.float32), torch.tensor(y_train, dtype=torch.float32))
test = TensorDataset(torch.tensor(scaler.transform(x_test), dtype=torch.float32), torch.tensor(y_test, dtype=torch.float32))
train_loader = DataLoader(train, batch_size=32, shuffle=True)
test_loader = DataLoader(test, batch_size=128)

model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(20):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in test_loader:
            right += ((model(x).squeeze(1) > 0) == y.bool()).sum().item()
            total += len(y)
print(f"accuracy {right / total:.3f}")
