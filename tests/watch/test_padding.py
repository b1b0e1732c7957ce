"""Numbers that fill up sequences, found without a declared padding_idx."""

import pytest
import torch

from osler.watch.criteria import positions, trailing


def filled(lengths, width=12, fill=0):
    table = torch.full((len(lengths), width), fill)
    for row, n in enumerate(lengths):
        table[row, :n] = torch.arange(n) % 7 + 1
    return table


LENGTHS = [3, 5, 12, 7, 9, 4, 12, 6]


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.T, lambda t: torch.cat([t, torch.full((len(t), 1), -100)], 1)])
def test_runs_at_the_ends_are_found(make):
    assert trailing(make(filled(LENGTHS)), -100) == 0


@pytest.mark.parametrize("table", [
    filled([12] * 8),
    filled([11] * 8),  # an end token is one number, not a run
    filled([6] * 8),  # sequences of one length
    filled(LENGTHS).where(torch.rand(8, 12, generator=torch.Generator().manual_seed(0)) < 0.8, 0),  # occurs elsewhere
    filled(LENGTHS).masked_fill(filled(LENGTHS) == 0, -100),  # ignored already
    torch.randint(0, 5, (8, 12), generator=torch.Generator().manual_seed(0)),
    torch.zeros(8, 12, dtype=torch.long),
    torch.zeros(2, 2, dtype=torch.long),
])
def test_other_tables_have_none(table):
    assert trailing(table, -100) is None


def test_the_scores_tell_the_shape_of_flat_targets():
    targets = filled(LENGTHS)
    scores = torch.nn.Linear(4, 9)(torch.randn(8, 12, 4))
    assert positions(scores.reshape(-1, 9), targets.flatten().clone()).shape == (8, 12)  # by the scores
    assert positions(torch.randn(96, 9), targets.view(-1)).shape == (8, 12)  # by the targets
    assert positions(scores.transpose(1, 2), targets).shape == (8, 12)
    assert positions(torch.randn(96, 9), targets.flatten().clone()) is None
