"""Encoder-decoder transformer reverses digit strings; padding ignored in the loss and masked in attention."""
import torch
from torch import nn

PAD, BOS, EOS = 0, 1, 2
torch.manual_seed(0)


def batch(n=32):
    rows = [torch.randint(3, 13, (int(torch.randint(3, 8, (1,))),)) for _ in range(n)]
    src = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    tgt = nn.utils.rnn.pad_sequence([torch.cat([torch.tensor([BOS]), r.flip(0), torch.tensor([EOS])]) for r in rows], batch_first=True, padding_value=PAD)
    return src, tgt


class Seq2Seq(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(13, d, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(12, d) * 0.02)
        self.core = nn.Transformer(d, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(d, 13)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=torch.bool)
        h = self.core(self.emb(src) + self.pos[:src.shape[1]], self.emb(tgt) + self.pos[:tgt.shape[1]], tgt_mask=mask,
                      src_key_padding_mask=src == PAD, tgt_key_padding_mask=tgt == PAD, memory_key_padding_mask=src == PAD)
        return self.out(h)


model = Seq2Seq()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
ce = nn.CrossEntropyLoss(ignore_index=PAD)
for step in range(150):
    src, tgt = batch()
    logits = model(src, tgt[:, :-1])
    loss = ce(logits.flatten(0, 1), tgt[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
print(loss.item())
