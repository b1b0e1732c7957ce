"""Processes of one process group become each other's peers."""

from __future__ import annotations

from osler.core.facts import Fact
from osler.core.window import Window
from osler.diagnose.ranks import together


def member(rank: int, world: int = 2, meeting: str = "here", clock: float = 0.0) -> Window:
    return Window(all_facts=(Fact("process-group", 0, 0.0, None, {"world": world, "rank": rank, "meeting": meeting, "clock": clock}),), rank=rank)


def test_members_of_a_group_are_peers():
    found = together({(0, 1): member(0), (1, 1): member(1), (2, 1): Window()})
    assert [p.rank for p in found[0, 1].peers] == [1] and [p.rank for p in found[1, 1].peers] == [0]
    assert not found[2, 1].peers and not found[0, 1].peers[0].peers


def test_the_rank_is_the_one_in_the_group_not_that_of_the_folder():
    found = together({(0, 1): member(0), (0, 2): member(1)})
    assert found[0, 2].rank == 1 and [p.rank for p in found[0, 1].peers] == [1]


def test_two_groups_that_met_at_one_place_one_after_the_other():
    found = together({(0, 1): member(0, clock=10.0), (1, 1): member(1, clock=10.1), (0, 2): member(0, clock=90.0), (1, 2): member(1, clock=90.2)})
    assert found[0, 2].peers[0].all_facts[0]["clock"] == 90.2 and found[0, 1].peers[0].all_facts[0]["clock"] == 10.1


def test_alone():
    assert not together({(0, 1): member(0, world=1)})[0, 1].peers
    assert not together({(0, 1): member(0), (1, 1): member(1, meeting="elsewhere")})[0, 1].peers
