"""In evaluation mode these take a fused path that forward hooks turn off: other numbers, so no hook may be there."""
import warnings

import torch
from _end import digest, seed, show
from torch import nn

warnings.simplefilter("ignore")
seed(27)
layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, activation="gelu")
encoder, head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)
attention = nn.MultiheadAttention(16, 4, batch_first=True)
parameters = [*encoder.parameters(), *head.parameters(), *attention.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
for step in range(8):
    encoder.train()
    x, y = torch.randn(4, 7, 16), torch.randint(0, 3, (4,))
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[:, 5:] = True
    h = encoder(x, src_key_padding_mask=padding)
    h = h + attention(h, h, h, need_weights=False)[0]
    loss = nn.functional.cross_entropy(head(h.mean(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    encoder.eval()
    attention.eval()
    with torch.no_grad():
        fused = encoder(x, src_key_padding_mask=padding)
        mixed, weights = attention(x, x, x)
    with torch.inference_mode():
        again = encoder(x)
    attention.train()
    print(step, repr(loss.item()), fused.shape, digest(fused, mixed, weights, again))
show(encoder, head, attention)
