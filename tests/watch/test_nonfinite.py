"""Which node of a graph made a value that is not finite."""

import pytest
import torch
import torch.nn.functional as F

from osler.watch import nonfinite
from osler.watch.graph import walk

X = torch.randn(4, 3)


def born(make):
    x = X.clone().requires_grad_(True)
    found = nonfinite.locate(walk([make(x).grad_fn]))
    return found[1] if found is not None else None


@pytest.mark.parametrize("make", [
    lambda x: x[x > 99].mean(),
    lambda x: x[:0].mean(0).sum(),
    lambda x: F.mse_loss(x[:0], X[:0]),
    lambda x: F.smooth_l1_loss(x[:0], X[:0]),
    lambda x: F.cross_entropy(x, torch.full((4,), -100)),
    lambda x: x[:0].sum() / (X > 99).sum(),  # a count is of an integer type
    lambda x: x.sum() / torch.zeros(()),
])
def test_means_over_nothing_divide_by_zero(make):
    assert born(make) == "division-by-zero"


@pytest.mark.parametrize("make", [
    lambda x: x.mean(),
    lambda x: x[:0].sum(),
    lambda x: F.mse_loss(x[:0], X[:0], reduction="sum"),
    lambda x: F.cross_entropy(x, torch.tensor([0, -100, 1, -100])),
    lambda x: x.sum() / torch.tensor(3),
])
def test_others_make_nothing(make):
    assert born(make) is None
