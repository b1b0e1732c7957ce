"""W3: transformer with 6 layers of width 256, sequence 128, batch 8, AdamW with gradient clipping."""
import _clock
import _peers
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary=512, width=256, layers=6, heads=8, length=128):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        h = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.layers(h)))


ids = torch.randint(0, 512, (8, 8, 129))
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
peer, clock = _peers.start(model, optimizer), _clock.Clock()

for step in _clock.steps(40):
    clock.start()
    batch = ids[step % 8]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    peer.before_step(step, loss)
    optimizer.step()
    peer.after_step(step, loss)
    clock.stop()
clock.write()
