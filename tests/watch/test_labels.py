"""Pairing of inputs and targets, absurd rows, shifts of tokens: the questions themselves, without a fork."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from osler.watch.experiments.capture import Capture
from osler.watch.experiments.label_sources import label_dependence, of_collated
from osler.watch.experiments.labels import contradictions, dependence
from osler.watch.experiments.outliers import absurd_rows
from osler.watch.experiments.rowset import of_arrays, of_dataset, parts
from osler.watch.experiments.tokens import token_shift


def blobs(n=400, noise=0.0, seed=0):
    g = np.random.default_rng(seed)
    y = g.integers(0, 4, n)
    x = (np.random.default_rng(9).normal(size=(4, 6)) * 2)[y] + 0.5 * g.normal(size=(n, 6))
    wrong = g.random(n) < noise
    y = np.where(wrong, g.integers(0, 4, n), y)
    return x.astype(np.float32), y


def rows(x, y):
    found = of_arrays(x, y, "x")
    assert found is not None
    return found


def capture_of(x: torch.Tensor, y: torch.Tensor, loaders: Any = (), active: int = -1) -> Capture:
    root = nn.Linear(x.shape[1], 4) if x.is_floating_point() else nn.Embedding(50, 4)
    return Capture(root=root, root_id=0, names={}, built_at=lambda m: None, args=(x,), kwargs={}, target=y, targets=[y], loaders=list(loaders), active=active)


def test_pairs_that_belong_together_are_told():
    found = dependence(rows(*blobs()))
    assert found is not None and found[0]["score"] > 0.9 and found[0]["z"] > 20 and found[0]["shift"] == 0


def test_the_label_of_the_row_before():
    x, y = blobs()
    row, _ = dependence(rows(x[1:], y[:-1]))
    assert row["z"] < 4 and row["shift"] == 1 and row["shift_score"] > 0.9 and abs(row["neighbours"]) < 0.1


def test_a_forecast_of_the_series_itself_is_no_shift():
    s = np.random.default_rng(0).normal(size=600).astype(np.float32)
    x, y = np.stack([s[i:i + 8] for i in range(500)]), s[8:508]
    row, _ = dependence(rows(x, y))
    assert row["shift_z"] < 6


def test_noise_shows_against_clean_rows_only():
    clean = rows(*blobs(300, seed=1))
    noisy = rows(*blobs(400, noise=0.5))
    assert contradictions(noisy, dependence(noisy)[1], clean)["contradicted"] > 0.25 > 0.1 > contradictions(noisy, dependence(noisy)[1], clean)["other_contradicted"]
    x, y = blobs(300, seed=1)
    coded = contradictions(rows(*blobs()), dependence(rows(*blobs()))[1], rows(x, (y + 1) % 4))
    assert coded["other_score"] < 0.2 and coded["mapped"] > 0.9


def test_the_batch_has_targets_of_other_rows():
    x, y = (torch.from_numpy(a) for a in blobs())
    perm = torch.randperm(len(x))
    told: list[dict[str, Any]] = []
    label_dependence(capture_of(x[perm[:32]], y[:32]), told.append)
    assert told[0]["pair"] == "y" and told[0]["paired"] < 0.6 and told[0]["z"] > 20
    label_dependence(capture_of(x[perm[:32]], y[perm[:32]]), told.append)
    assert told[1]["paired"] == 1.0


def test_a_batch_that_lost_its_pairs_behind_the_data_set():
    x, y = (torch.from_numpy(a) for a in blobs())
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    told: list[dict[str, Any]] = []
    perm = torch.arange(32).flip(0)
    label_dependence(capture_of(x[:32][perm], y[:32], [(0, loader)], 0), told.append)
    label_dependence(capture_of(x[:32], y[:32], [(0, loader)], 0), told.append)
    assert told[0]["kept"] < 0.6 and told[1]["kept"] == 1.0


def test_another_order_in_memory_makes_sense_of_the_labels():
    x, y = blobs()
    perm = np.random.default_rng(3).permutation(len(x))
    x = x[perm]
    told: list[dict[str, Any]] = []
    label_dependence(capture_of(torch.from_numpy(x[:32]), torch.from_numpy(y[:32])), told.append)
    assert told[0]["z"] < 4 and "perm" in told[0]["repair"] and told[0]["repair_score"] > 0.9


class Items(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": torch.from_numpy(self.x[i]), "label": int(self.y[i])}


def test_rows_of_data_sets():
    x, y = blobs()
    assert of_dataset(Items(x, y), 60.0).x.shape == (400, 6)
    part = of_dataset(Subset(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), range(100, 300)), 60.0)
    assert len(part.x) == 200 and len(part.all_y) == 400 and part.index[0] == 100
    assert [len(p) for p in parts(([1, 2, 3], [4, 5]))] == [3, 2]
    assert parts({"label": 3, "x": [0.5, 1.0]})[-1] == 3
    numbered = [(x[i], int(y[i]), i) for i in range(len(y))]
    assert of_dataset(numbered, 60.0).classes == 4

    first = [(i, x[i], int(y[i])) for i in range(len(y))]
    assert of_dataset(first, 60.0).x.shape == (400, 6)

    def collate(items):
        return torch.stack([i["x"] for i in items]), torch.tensor([i["label"] for i in items]).flip(0)

    turned = of_collated(DataLoader(Items(x, y), batch_size=20, collate_fn=collate), 60.0)
    assert turned is not None and dependence(turned)[0]["z"] < 6


def test_absurd_rows_stand_alone_and_heavy_tails_do_not():
    x, _ = blobs()
    goal = x[:, :1].copy()
    assert absurd_rows(rows(x, goal)) is None
    bad = x.copy()
    bad[37] *= 1e5
    found = absurd_rows(rows(bad, goal))
    assert found["rows"] == [37] and found["what"] == "input" and found["extent"] > 1e4
    goal[11] *= 1e4
    assert absurd_rows(rows(x, goal))["what"] == "target"
    g = np.random.default_rng(0)
    assert absurd_rows(rows(x, g.standard_t(2, size=(400, 1)).astype(np.float32))) is None
    sparse = (g.random((400, 60)) < 0.01).astype(np.float32)
    assert absurd_rows(rows(sparse, goal[:, 0] * 0 + x[:, 0])) is None


def test_shifts_of_tokens():
    data = torch.randint(0, 50, (8, 20))
    x = data[:, :16]
    assert token_shift(capture_of(x, data[:, 1:17].reshape(-1)))["shift"] == 1
    assert token_shift(capture_of(x, data[:, 2:18].reshape(-1)))["shift"] == 2
    assert token_shift(capture_of(x, torch.randint(0, 50, (128,)))) is None
