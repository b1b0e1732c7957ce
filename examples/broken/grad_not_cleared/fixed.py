"""Three kinds of wine from thirteen measurements. The loss swings instead of settling: why?"""
import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

torch.manual_seed(1)
x, y = load_wine(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, stratify=y, random_state=1)
scaler = StandardScaler().fit(x_train)
x_train, x_test = (torch.tensor(scaler.transform(a), dtype=torch.float32) for a in (x_train, x_test))
y_train, y_test = torch.tensor(y_train), torch.tensor(y_test)

model = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(40):
    model.train()
    losses = []
    for batch in torch.randperm(len(x_train)).split(16):
        loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 5 == 4:
        model.eval()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, test accuracy {accuracy:.3f}")
