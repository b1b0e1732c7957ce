import torch
from _end import seed, show
from torch import nn

seed(1)
model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
                      nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 5))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for _epoch in range(4):
    model.train()
    for _ in range(8):
        x, y = torch.randn(8, 3, 12, 12), torch.randint(0, 5, (8,))
        optimizer.zero_grad(set_to_none=False)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    model.eval()
    with torch.no_grad():
        print("validation", repr(criterion(model(torch.randn(16, 3, 12, 12)), torch.randint(0, 5, (16,))).item()))
show(model)
