"""Characters of a made-up grammar with a one-block transformer: AdamW, warm-up and cosine per step."""
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
words = ["tol", "rime", "sabu", "ken", "odar"]
text = " ".join(words[i] for i in torch.randint(0, 5, (3000,)).tolist())
chars = sorted(set(text))
codes = torch.tensor([chars.index(c) for c in text])
train_codes, val_codes = codes[:9000], codes[9000:]
CONTEXT, STEPS, WARMUP = 24, 260, 30


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        n, t, w = x.shape
        q, k, v = (part.view(n, t, self.heads, w // self.heads).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, w))
        return x + self.mlp(self.ln2(x))


class LanguageModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.token = nn.Embedding(len(chars), width)
        self.position = nn.Embedding(CONTEXT, width)
        self.block = Block(width, 2)
        self.drop = nn.Dropout(0.05)
        self.head = nn.Linear(width, len(chars))

    def forward(self, ids):
        h = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.drop(self.block(h)))


def batch(source, size):
    starts = torch.randint(0, len(source) - CONTEXT - 1, (size,))
    rows = torch.stack([source[s:s + CONTEXT + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: min(1.0, (s + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, s / STEPS))))
model.train()
for step in range(STEPS):
    ids, targets = batch(train_codes, 16)
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
model.eval()
with torch.no_grad():
    ids, targets = batch(val_codes, 100)
    val_loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
print(f"METRIC lower {val_loss.item():.6f}")
