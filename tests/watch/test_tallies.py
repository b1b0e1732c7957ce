"""Class counts and pulls: what is read is right, and nothing of the user's is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from osler.watch.tallies import Tally, labels_of, sampler_figures


def looked(function: str, loss: torch.Tensor, x: torch.Tensor, y: torch.Tensor, objective: torch.Tensor, **kwargs: object) -> dict:
    tally = Tally()
    tally.look(function, x, y, loss, kwargs, -100)
    objective.backward()
    return tally.to_json()


@pytest.mark.parametrize("factor", [1.0, -1.0, 1 / 16, 1000.0])
def test_the_pull_is_the_factor_of_the_criterion_in_the_objective(factor: float) -> None:
    x, y = torch.randn(8, 3, requires_grad=True), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(x, y)
    found = looked("cross_entropy", loss, x, y, factor * loss + x.pow(2).mean())
    assert found["pull"]["first"] == pytest.approx(factor)


def test_rows_weighted_by_class() -> None:
    x, y = torch.randn(40, 2, requires_grad=True), torch.tensor([0] * 30 + [1] * 10)
    rows = F.cross_entropy(x, y, reduction="none")
    found = looked("cross_entropy", rows, x, y, (rows * torch.tensor([0.9, 0.1])[y]).mean())
    assert found["class_pull"] == {"0": pytest.approx(0.9), "1": pytest.approx(0.1)}
    assert found["label_counts"] == [30, 10]
    assert sum(found["late"]["labels"]) == 40


def test_the_gradient_is_the_same_and_the_loss_can_be_saved(tmp_path) -> None:
    x, y = torch.randn(8, 3, requires_grad=True), torch.randint(0, 3, (8,))
    F.cross_entropy(x, y).backward()
    plain, x.grad = x.grad.clone(), None
    loss = F.cross_entropy(x, y)
    Tally().look("cross_entropy", x, y, loss, {}, -100)
    loss.backward()
    assert torch.equal(plain, x.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(loss, tmp_path / "loss.pt")


def test_sampler_weights_by_class() -> None:
    y = torch.tensor([0] * 90 + [1] * 10)
    data = TensorDataset(torch.randn(100, 2), y)
    counts = torch.bincount(y).float()
    good = DataLoader(data, sampler=WeightedRandomSampler((1 / counts)[y], 100))
    assert sampler_figures(good)["sampler_weights"]["class_weights"] == pytest.approx([1 / 90, 1 / 10])
    short = sampler_figures(DataLoader(data, sampler=WeightedRandomSampler(1 / counts, 100)))["sampler_weights"]
    assert short["n"] == 2 and short["class_counts"] == [90, 10]
    assert sampler_figures(DataLoader(data)) == {}


def test_labels_are_found_without_asking_for_an_item() -> None:
    class Held(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.targets = [0, 1, 1]

        def __getitem__(self, i: int) -> None:
            raise AssertionError

    assert labels_of(Held()).tolist() == [0, 1, 1]
    assert labels_of(Subset(Held(), [2, 0])).tolist() == [1, 0]
    assert labels_of(TensorDataset(torch.randn(3, 2), torch.randn(3))) is None
