"""What is told of schedulers and of gradient clipping: calls, places, lengths, and gradients that were there to be cut."""

import functools
import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, ReduceLROnPlateau

from osler.watch.taps.clipping import Clips, length
from osler.watch.taps.schedulers import Schedules, fields, numbers_of, parts, wrap

WARM = 7


def session():
    facts = []
    return SimpleNamespace(finishers=[], writer=object(), step=0, fast=False, own=0.0, guard=SimpleNamespace(armed=lambda _: True, failed=lambda _: None),
                           registry=SimpleNamespace(known_uid=id), fact=lambda kind, at, **data: facts.append((kind, data))), facts


def optimizer():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def training(made):
    loop = SimpleNamespace(index=0, steps=0, ref=lambda: made, sentinel=None)
    return SimpleNamespace(by_id={id(made): loop}, live=lambda: [loop]), loop


def test_calls_are_counted_with_their_values_and_the_optimizers_they_set():
    watched, facts = session()
    _, made = optimizer()
    trains, loop = training(made)
    schedules = Schedules(watched, trains)
    plateau = ReduceLROnPlateau(made, mode="max", patience=1)
    schedules.constructed(plateau)
    step = wrap(watched, schedules, ReduceLROnPlateau.step)
    for i in range(4):
        loop.steps = watched.step = 10 * i
        step(plateau, 2.0 - i)
    schedules.finish()
    told = facts[-1][1]
    assert told["steps"] == 4 and told["early"] == 1 and told["drives"] == [0] and told["metric"]
    assert [m[0] for m in told["marks"]] == [0, 10, 20, 30] and [m[2] for m in told["marks"]] == [2.0, 1.0, 0.0, -1.0]
    assert told["attrs"]["mode"] == "max" and told["step_at"][2] == "test_calls_are_counted_with_their_values_and_the_optimizers_they_set"


def test_a_scheduler_that_is_gone_at_the_end_is_remembered():
    watched, facts = session()
    _, made = optimizer()
    schedules = Schedules(watched, training(made)[0])
    scheduler = ExponentialLR(made, gamma=0.5)
    schedules.constructed(scheduler)
    made.step()
    wrap(watched, schedules, ExponentialLR.step)(scheduler)
    del scheduler
    schedules.finish()
    assert facts[-1][1]["steps"] == 1 and math.isclose(facts[-1][1]["lr_last"][0], 0.05) and facts[-1][1]["attrs"]["gamma"] == 0.5


def test_parts_of_a_composite_are_not_the_users():
    _, made = optimizer()
    first, second = ExponentialLR(made, 0.9), ExponentialLR(made, 0.8)
    both = ChainedScheduler([first, second])
    assert list(parts(both)) == [first, second] and "_schedulers" not in fields(both)


def test_a_rate_function_is_read_and_not_called():
    total = 90

    def rate(step, peak=3):
        raise AssertionError(f"called with {step} {peak} {total} {WARM}")

    assert numbers_of(rate) == {"total": 90, "peak": 3, "WARM": 7}
    assert numbers_of(functools.partial(rate, num_training_steps=50))["num_training_steps"] == 50
    _, made = optimizer()
    assert fields(LambdaLR(made, lambda step: 1.0))["base_lrs"] == [0.1]


def test_clipping_tells_gradients_from_their_absence():
    watched, facts = session()
    model, made = optimizer()
    clips = Clips(watched, SimpleNamespace(scaled=False), training(made)[0])
    for i in range(3):
        clips.after(clips.before("clip_grad_norm_", 1.0, list(model.parameters())), torch.tensor(0.0))
        watched.step = i
    model(torch.ones(1, 3)).sum().backward()
    clips.after(clips.before("clip_grad_norm_", 1.0, list(model.parameters())), torch.tensor(5.0))
    row = next(iter(clips.rows.values()))
    assert (row["absent"], row["fresh"], row["zero"], row["clipped"]) in {(3, 0, 3, 0), (3, 1, 3, 1)}
    clips.finish()
    assert facts[0][1]["position"] == "before backward" and facts[0][1]["parameters"] == 2


def test_clipping_by_value_measures_what_it_cuts():
    watched, facts = session()
    model, made = optimizer()
    clips = Clips(watched, SimpleNamespace(scaled=False), training(made)[0])
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    clips.after(clips.before("clip_grad_value_", 0.5, list(model.parameters())), None)
    clips.finish()
    assert facts[0][1]["cut_share"] == 1.0 and math.isclose(facts[0][1]["factor"], 4.0) and math.isclose(length([torch.ones(4)]), 2.0)
