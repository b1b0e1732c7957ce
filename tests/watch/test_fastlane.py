"""What the fast lane counts: steps of one optimizer by the step number alone, those of several one by one."""

from __future__ import annotations

from types import SimpleNamespace

from osler.watch.fastlane import FastLane


def lane(step: int) -> FastLane:
    return FastLane(SimpleNamespace(step=step, fast=False, leave_fast=None))  # type: ignore[arg-type]


def test_steps_of_a_single_optimizer_are_the_steps_since_it_was_entered() -> None:
    fast, optimizer = lane(100), object()
    fast.enter(200)
    fast.single = id(optimizer)
    fast.session.step = 130
    assert fast.counted(optimizer) == 30


def test_steps_of_several_are_told_apart() -> None:
    fast, first, second = lane(10), object(), object()
    fast.enter(200)
    fast.counts[id(first)] = 4
    assert (fast.counted(first), fast.counted(second)) == (4, 0)


def test_wrappers_are_swapped_and_put_back_unless_a_user_replaced_them() -> None:
    fast, place = lane(0), SimpleNamespace(kept="full", taken="full")
    fast.register(place, "kept", "full", "quick")
    fast.register(place, "taken", "full", "quick")
    fast.enter(5)
    assert (place.kept, place.taken) == ("quick", "quick")
    place.taken = "user"
    fast.leave()
    assert (place.kept, place.taken) == ("full", "user")
