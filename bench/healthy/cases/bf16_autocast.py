"""bfloat16 autocast with float32 weights, class-based trainer."""
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn


@dataclass
class Config:
    lr: float = 2e-3
    epochs: int = 4
    batch: int = 64
    hidden: int = 128


class Trainer:
    def __init__(self, cfg):
        torch.manual_seed(0)
        self.cfg = cfg
        X, y = load_digits(return_X_y=True)
        X, y = torch.tensor(X, dtype=torch.float32) / 16, torch.tensor(y)
        order = torch.randperm(len(X))
        self.train, self.test = order[:1400], order[1400:]
        self.X, self.y = X, y
        self.model = nn.Sequential(nn.Linear(64, cfg.hidden), nn.GELU(), nn.LayerNorm(cfg.hidden), nn.Linear(cfg.hidden, 10))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)

    def step(self, idx):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(self.X[idx]), self.y[idx])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = self.model(self.X[self.test]).argmax(1) == self.y[self.test]
        self.model.train()
        return hits.float().mean().item()

    def run(self):
        for _ in range(self.cfg.epochs):
            for idx in self.train[torch.randperm(len(self.train))].split(self.cfg.batch):
                self.step(idx)
            print(self.evaluate())


Trainer(Config()).run()
