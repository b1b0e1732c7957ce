"""Handwritten digits, one hidden layer. Trains, but the loss stops far above zero: why?"""
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(images / 16, labels, test_size=0.3, stratify=labels, random_state=0)
train = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
loader = DataLoader(train, batch_size=32, shuffle=True)
x_test, y_test = torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test)

model = nn.Sequential(
    nn.Linear(64, 128),
    nn.ReLU(),
    nn.Linear(128, 10),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(12):
    model.train()
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
    model.eval()
    with torch.no_grad():
        output = model(x_test)
        test_loss = criterion(output, y_test).item()
        accuracy = (output.argmax(1) == y_test).float().mean().item()
    print(f"epoch {epoch}: loss {total / len(train):.4f}, test loss {test_loss:.4f}, test accuracy {accuracy:.3f}")
