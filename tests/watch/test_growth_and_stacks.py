"""Containers that grow, and where the time of the training thread goes."""

import sys
import threading
import time
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from osler.watch import growth, stacks
from osler.watch.elements import describe
from osler.watch.growth import Growth
from osler.watch.stacks import Stacks


def session():
    facts = []
    return SimpleNamespace(finishers=[], writer=object(), finished=False, step=0, own=0.0, registry=SimpleNamespace(modules=list), facts=facts,
                           guard=SimpleNamespace(armed=lambda tap: True, failed=lambda tap: pytest.fail(tap)),
                           fact=lambda kind, at, **data: facts.append((kind, data)))


@pytest.fixture
def here(monkeypatch):
    """This file counts as a user's."""
    mine = Growth.look.__wrapped__.__code__.co_filename, Stacks._run.__code__.co_filename
    monkeypatch.setattr(growth, "is_user", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(stacks, "is_user", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(stacks, "_sorts", {})
    monkeypatch.setattr(growth, "SECONDS", 5.0)
    return mine


def looked(watch, step):
    watch.session.step = step
    watch.look()


def series(watch, name):
    return next(s for s in watch.series.values() if s.name == name)


def test_lengths_of_variables_attributes_and_nested_lists(here):
    watch = Growth(session())

    def train():  # on its own, since pytest writes a call of locals() into functions that assert
        losses, history = [], {"out": []}
        for step in range(1, 6):
            losses.append(step)
            history["out"].append(torch.zeros(8))
            looked(watch, step)

    train()
    assert series(watch, "losses").lens == [1, 2, 3, 4, 5] and series(watch, "losses").element == "int"
    assert series(watch, "history['out']").element == "tensor" and series(watch, "history['out']").grew

def test_elements_that_carry_graphs_and_graphs_that_grow(here):
    watch = Growth(session())

    def train():
        model, outs, total = nn.Linear(2, 1), [], 0
        for step in range(1, 5):
            loss = model(torch.ones(1, 2)).sum()
            outs.append((loss, step))
            total = total + loss
            looked(watch, step)

    train()
    assert series(watch, "outs").grad
    assert series(watch, "total").type == "graph" and series(watch, "total").lens == sorted(set(series(watch, "total").lens))
    assert len(set(series(watch, "loss").lens)) == 1


def test_nothing_is_kept_alive_and_kept_copies_of_locals_stay(here):
    watch = Growth(session())

    def step():
        big = torch.zeros(10)
        alive = weakref.ref(big)
        looked(watch, 1)
        del big
        return alive()

    def holds():
        value = 1
        mine = locals()
        looked(watch, 2)
        return mine["value"], value

    assert step() is None
    assert holds() == (1, 1)


def test_bounded_queues_say_so(here):
    watch = Growth(session())

    def train():
        recent = deque(maxlen=3)
        for step in range(1, 6):
            recent.append(step)
            looked(watch, step)

    train()
    assert series(watch, "recent").maxlen == 3


@pytest.mark.parametrize(("value", "kind", "grad"), [
    (torch.zeros(4), "tensor", False), (torch.zeros(4, requires_grad=True) * 2, "tensor", True), ({"a": 1.0}, "dict of float", False),
    ([torch.zeros(2), 3], "list of tensor", False), (3, "int", False), ("text", "str", False), ({}, "dict", False)])
def test_elements_are_described(value, kind, grad):
    found, size, carries = describe(value)
    assert (found, carries) == (kind, grad) and size > 0


def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_time_by_line_and_whether_it_worked(here):
    watch = Stacks(session())
    watch.start()
    while watch.samples < 20:
        busy(0.1)
    first = watch.samples
    while watch.samples < first + 20:
        time.sleep(0.05)
    watch.finish()
    kind, data = watch.session.facts[-1]
    rows = {r["stack"][0][2]: r for r in data["rows"] if r["stack"]}
    assert kind == "time" and data["samples"] >= 10
    assert rows["busy"]["seconds"] > 0.1
    waiting = rows["test_time_by_line_and_whether_it_worked"]
    assert waiting["seconds"] > 0.1 and waiting["cpu"] < 0.3 * waiting["seconds"]


def test_the_thread_is_not_there_during_a_fork_and_comes_back(here):
    watch = Stacks(session())
    before, frames = threading.active_count(), set(sys._current_frames())
    watch.start()
    assert threading.active_count() == before, "it is no thread of the threading module"
    watch._pause()
    assert watch._stop is None and set(sys._current_frames()) <= frames
    watch._resume()
    assert watch._stop is not None
    watch.finish()
    assert watch._stop is None
