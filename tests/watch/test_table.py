"""The comparison of training and validation rows, asked in this process: what each answer says of tables made for it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from osler.watch.experiments.table import table


def ask(training: Any = (), judging: Any = (), seen: Any = (), judged: Any = None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    table(list(training), list(judging), list(seen), judged, sys._getframe(1), rows.append)
    return rows[-1]


def halves(data: Any, n: int) -> tuple[Any, Any]:
    return random_split(data, [n, len(data) - n], generator=torch.Generator().manual_seed(0))


def test_independent_rows_are_silent() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = halves(TensorDataset(torch.randn(600, 12, generator=g), torch.randint(0, 2, (600,), generator=g)), 450)
    found = ask([a], [b])
    assert found["overlap"]["hits"] == 0 and found["shifted"]["share"] == 0 and found["twins"]["share"] < 0.05
    assert 0.9 < found["order"]["alike"] < 1.1 and found["order"]["between"] > 0.5
    assert found["column"]["kind"] == "strong" and found["column"]["score"] < 0.7


def test_patients_are_seen_by_their_name_and_by_their_clusters() -> None:
    g = torch.Generator().manual_seed(2)
    patient = torch.arange(40).repeat_interleave(15)
    x = torch.randn(40, 16, generator=g)[patient] + 0.2 * torch.randn(600, 16, generator=g)
    a, b = halves(TensorDataset(x, torch.randint(0, 2, (40,), generator=g)[patient]), 450)
    found = ask([a], [b])
    named = next(r for r in found["groups"] if r["name"] == "patient")
    assert named["groups"] == 40 and named["both"] == 1.0 and named["pure"] == 1.0 and named["alike"] < 0.5
    assert found["twins"]["share"] > 0.8 and 30 <= found["twins"]["cells"] <= 60
    held = ask([Subset(a.dataset, range(450))], [Subset(a.dataset, range(450, 600))])
    assert next(r for r in held["groups"] if r["name"] == "patient")["both"] == 0.0 and held["twins"]["share"] < 0.1


class Windows(Dataset[Any]):
    def __init__(self, series: torch.Tensor, starts: Any) -> None:
        self.series, self.starts = series, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, k: int) -> Any:
        at = int(self.starts[k])
        return self.series[at:at + 24], self.series[at + 24, 0]


def test_windows_that_overlap_and_neighbours_in_time() -> None:
    g = torch.Generator().manual_seed(3)
    series = 0.1 * torch.randn(1500, 2, generator=g).cumsum(0)
    starts = torch.arange(0, 1470, 3)
    order = torch.randperm(len(starts), generator=g)
    mixed = ask([Windows(series, starts[order[:350]])], [Windows(series, starts[order[350:]])])
    assert mixed["shifted"]["share"] > 0.95 and mixed["order"]["between"] > 0.6
    assert mixed["order"]["alike"] < 0.5 < mixed["order"]["lags"]["20"] / mixed["order"]["lags"]["1"]
    later = ask([Windows(series, starts[:350])], [Windows(series, starts[360:])])
    assert later["shifted"]["share"] < 0.02 and later["order"]["between"] < 0.02


def test_columns_and_windows_that_give_the_target_away() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(500, 5)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=500) > 0).astype(np.int64)
    refund = np.where(y == 1, rng.uniform(1, 2, 500), 0).astype(np.float32)
    data = TensorDataset(torch.from_numpy(np.column_stack([x, refund])), torch.from_numpy(y))
    column = ask([data], [data])["column"]
    assert column["index"] == 5 and column["kind"] == "threshold" and column["second"] < 0.9
    series = torch.randn(600)
    windows = torch.stack([series[i:i + 17] for i in range(500)])
    given = ask([TensorDataset(windows, series[16:516])], [])["window_target"]
    assert given["found"] == 1 and given["places"] == [16]
    assert ask([TensorDataset(windows[:, :16], series[16:516])], [])["window_target"] is None
    assert ask([TensorDataset(windows, windows)], [])["window_target"] is None


def test_rows_in_frames() -> None:
    X_train, X_val = torch.randn(300, 8), torch.randn(100, 8)
    y_train = torch.randint(0, 2, (300,))
    seen = [(X_train[:32], y_train[:32]), (X_train[32:64], y_train[32:64])]
    found = ask(seen=seen, judged=X_val)
    assert found["source"] == "tensors" and found["train_rows"] == 300 and found["judged_rows"] == 100 and found["overlap"]["hits"] == 0
    X_val = torch.cat([X_val, X_train[:50]])
    assert ask(seen=seen, judged=X_val)["overlap"]["hits"] == 50


def test_rows_that_nothing_names_are_not_believed() -> None:
    """Batches of a table on which the whole table is judged: perhaps a look at the training accuracy."""
    table_of_mine = torch.randn(400, 8)
    seen = [(table_of_mine[:32], None), (table_of_mine[32:64], None)]
    assert ask(seen=seen, judged=table_of_mine)["judged_rows"] == 0


def test_a_batch_of_the_training_loader_is_no_validation() -> None:
    data = TensorDataset(torch.randn(200, 8), torch.randint(0, 2, (200,)))
    batch = next(iter(DataLoader(data, 50)))[0]
    assert ask([data], judged=batch)["judged_rows"] == 0


class Utterances(Dataset[Any]):
    """Items by name; the speaker stands in the item alone."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.who = [k // 15 for k in range(600)]
        self.rows = torch.randn(40, 16, generator=g)[torch.tensor(self.who)] + 0.2 * torch.randn(600, 16, generator=g)
        self.kind = torch.randint(0, 3, (40,), generator=g)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, k: int) -> Any:
        return {"feat": self.rows[k], "speaker": self.who[k], "accent": self.kind[self.who[k]]}


def test_items_by_name_carry_their_entity_and_target() -> None:
    found = ask(*([side] for side in halves(Utterances(), 450)))
    named = next(r for r in found["groups"] if r["name"] == "speaker")
    assert named["groups"] == 40 and named["pure"] == 1.0 and named["alike"] < 0.5


class Numbered(Dataset[Any]):
    """Items that begin with their own number, as detectors and samplers of hard rows want it."""

    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 6, generator=g), torch.randint(0, 2, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.y[i]


def test_the_number_of_a_row_is_no_input() -> None:
    found = ask([Numbered(600, 0)], [Numbered(200, 1)])
    assert found["shape"] == [6] and found["overlap"]["hits"] == 0
    same = ask([Numbered(600, 0)], [Numbered(200, 0)])
    assert same["shape"] == [6]
