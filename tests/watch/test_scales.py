"""Sizes and ranges that the rules on signals read: data at the first weights, differences by hand, targets of criterions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from osler.watch.criteria import Criterion
from osler.watch.operands import figures


def test_data_at_trainable_weights() -> None:
    x = torch.tensor([[1.0, 1000.0], [3.0, 2000.0]])
    layer = nn.Linear(2, 4)
    raw = figures("linear", (x, layer.weight, layer.bias), {})["raw"]
    assert raw["max"] == 2000.0 and raw["shape"] == [2, 2]
    assert raw["columns"]["rms"] == pytest.approx([5**0.5, 2.5e6**0.5])
    assert raw["columns"]["std"] == pytest.approx([1.0, 500.0])


def test_hidden_values_frozen_weights_and_evaluation_are_left_out() -> None:
    x, layer = torch.randn(2, 2), nn.Linear(2, 4)
    assert figures("linear", (x * layer.weight[0, 0], layer.weight, layer.bias), {}) == {}
    with torch.no_grad():
        assert figures("linear", (x, layer.weight, layer.bias), {}) == {}
    layer.requires_grad_(False)
    assert figures("linear", (x, layer.weight, layer.bias), {}) == {}


def test_data_joined_to_an_embedding_or_weighed_by_hand() -> None:
    learned = nn.Embedding(3, 2)(torch.tensor([0, 1]))
    assert figures("cat", ([learned, torch.full((2, 3), 50.0)],), {})["raw"]["mean"] == 50.0
    assert figures("cat", ([torch.zeros(2, 2), torch.zeros(2, 3)],), {}) == {}
    weight = torch.zeros(1, requires_grad=True)
    assert figures("mul", (weight, torch.arange(1950, 1970).float()), {})["raw"]["min"] == 1950.0


def test_differences_by_hand() -> None:
    made, given = nn.Linear(2, 1)(torch.randn(4, 2)), torch.tensor([[-2.0], [0.5], [3.0], [5.0]])
    for args in ((made, given), (given, made)):
        found = figures("sub", args, {})["residual"]
        assert found["target"]["max"] == 5.0 and found["target"]["above_one"] == 0.5 and found["target"]["below_minus_one"] == 0.25
    assert figures("sub", (made, made), {}) == {}
    assert figures("mul", (given, (made.sigmoid() + 1e-6).log()), {})["residual"]["log"] is True


def test_targets_of_a_criterion() -> None:
    criterion = Criterion(0, "mse_loss", None, None, 0)
    for low in (0.0, 2.0):
        criterion.figures(torch.full((2, 2), low), torch.tensor([[low, 10.0], [low + 2, 10.0]]))
    row = criterion.to_json()
    assert row["target_mean"] == 6.0 and row["target_std_within"] == pytest.approx(0.5**0.5)
    assert row["target_above_one"] == pytest.approx(7 / 8) and row["target_below_zero"] == 0.0
    assert row["prediction_first"]["mean"] == 0.0 and row["prediction_last"]["mean"] == 2.0
