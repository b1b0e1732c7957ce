"""Figures of masks and token ids: at which end rows are filled up, and which end a mask hides."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from osler.watch.observe import input_figures
from osler.watch.operands import figures, mask_figures


def test_a_mask_says_which_end_it_hides() -> None:
    keep = torch.arange(12)[None] < torch.randint(3, 11, (16, 1), generator=torch.Generator().manual_seed(0))
    assert mask_figures(~keep, additive=False)["hides_tail"] == 1.0
    assert mask_figures(keep, additive=False)["hides_head"] == 1.0
    assert mask_figures(keep[:, None, None], additive=False)["hides_head"] == 1.0
    assert "hides_head" not in mask_figures(torch.ones(12, 12).triu(1).bool(), additive=False)


def test_ids_say_which_end_is_filled_up() -> None:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (16, 12), generator=g) * (torch.arange(12)[None] < torch.randint(3, 10, (16, 1), generator=g))
    found = figures("embedding", (ids, torch.zeros(50, 4)), {})
    assert found["padded_tail"] == 1.0 and found["padded_head"] < 0.2
    assert figures(embedding.__name__, (ids.flip(1), torch.zeros(50, 4)), {})["padded_head"] == 1.0
    assert figures("embedding", (ids[:, 0], torch.zeros(50, 4)), {}) == {}


def test_a_batch_by_name_is_an_input() -> None:
    found = input_figures((({"feat": torch.ones(8, 3)},), {}))
    assert found is not None and found["shape"] == [8, 3]
