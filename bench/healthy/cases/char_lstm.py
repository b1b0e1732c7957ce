"""Character language model on a generated grammar, truncated backpropagation with the state carried over and detached."""
import random

import torch
from torch import nn

random.seed(1)
torch.manual_seed(1)
SUBJ, VERB, OBJ = ["the cat", "a dog", "my bird"], ["sees", "likes", "hunts"], ["mice", "fish", "seeds"]
text = " ".join(f"{random.choice(SUBJ)} {random.choice(VERB)} {random.choice(OBJ)}." for _ in range(600))
chars = sorted(set(text))
lookup = {c: i for i, c in enumerate(chars)}
stream = torch.tensor([lookup[c] for c in text])
B, T = 16, 24
n = len(stream) // B
stream = stream[: B * n].view(B, n)


class CharModel(nn.Module):
    def __init__(self, vocab, hidden=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, 24)
        self.rnn = nn.LSTM(24, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, tokens, state=None):
        h, state = self.rnn(self.emb(tokens), state)
        return self.out(h), state


model = CharModel(len(chars))
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
for epoch in range(4):
    state = None
    for t in range(0, n - T - 1, T):
        tokens, target = stream[:, t:t + T], stream[:, t + 1:t + T + 1]
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = model(tokens, state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, len(chars)), target.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    print(epoch, loss.item())
