"""One object per image: which class, and where; classification and box heads with a weighted sum of losses."""
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.cls = nn.Linear(24 * 16, 3)
        self.box = nn.Linear(24 * 16, 4)

    def forward(self, img):
        f = self.features(img)
        return {"logits": self.cls(f), "boxes": self.box(f).sigmoid()}


def scene(n):
    img = 0.1 * torch.randn(n, 1, 16, 16)
    cls = torch.randint(3, (n,))
    boxes = torch.empty(n, 4)
    for i in range(n):
        w, h = [(4, 4), (8, 3), (3, 8)][int(cls[i])]
        x, y = int(torch.randint(0, 16 - w, (1,))), int(torch.randint(0, 16 - h, (1,)))
        img[i, 0, y:y + h, x:x + w] += 1
        boxes[i] = torch.tensor([x, y, x + w, y + h]) / 16
    return img, {"cls": cls, "boxes": boxes}


torch.manual_seed(0)
net = Detector()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
ce, l1 = nn.CrossEntropyLoss(), nn.SmoothL1Loss(beta=0.1)
for it in range(100):
    img, truth = scene(24)
    out = net(img)
    losses = {"cls": ce(out["logits"], truth["cls"]), "box": 5.0 * l1(out["boxes"], truth["boxes"])}
    total = sum(losses.values())
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
print({k: round(v.item(), 3) for k, v in losses.items()})
