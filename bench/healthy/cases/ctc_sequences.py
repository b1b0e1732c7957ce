"""CTC on noisy frame sequences: every symbol lasts two or three frames, input lengths always suffice."""
import torch
from torch import nn

torch.manual_seed(0)
SYMBOLS, DIM = 5, 8
codes = torch.randn(SYMBOLS + 1, DIM)


def batch(size=16):
    frames, labels, n_frames, n_labels = [], [], [], []
    for _ in range(size):
        word = torch.randint(1, SYMBOLS + 1, (int(torch.randint(3, 6, (1,))),))
        rep = []
        for s in word:
            rep += [int(s)] * int(torch.randint(2, 4, (1,))) + [0]
        x = codes[rep] + 0.3 * torch.randn(len(rep), DIM)
        frames.append(x)
        labels.append(word)
        n_frames.append(len(rep))
        n_labels.append(len(word))
    return nn.utils.rnn.pad_sequence(frames), torch.cat(labels), torch.tensor(n_frames), torch.tensor(n_labels)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(DIM, 32, bidirectional=True)
        self.out = nn.Linear(64, SYMBOLS + 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)


model, ctc = Recogniser(), nn.CTCLoss(blank=0, zero_infinity=False)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    x, y, nx, ny = batch()
    loss = ctc(model(x), y, nx, ny)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
print(loss.item())
