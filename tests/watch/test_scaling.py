"""Counters of gradient scalers and samples of 16-bit weights, fed by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from osler.watch.halves import Halves, half_figures
from osler.watch.taps.scaling import Scaling


def session():
    facts = []
    registry = SimpleNamespace(uid=id)
    return SimpleNamespace(finishers=[], writer=object(), step=0, half=False, registry=registry, guard=SimpleNamespace(armed=lambda tap: True),
                           fact=lambda kind, at, **data: facts.append((kind, data))), facts


def scaling():
    watched, facts = session()
    loops = {}
    training = SimpleNamespace(by_id=loops, lane=SimpleNamespace(counted=lambda optimizer: 0), tracer=SimpleNamespace(armed=True), stop_trace=lambda: None)
    return Scaling(watched, SimpleNamespace(scaled=False), training), loops, facts


def cycle(watch, scaler, optimizer, loop, step=True):
    watch.event(scaler, "scales")
    watch.event(scaler, "unscales", optimizer)
    watch.event(scaler, "steps", optimizer, before=True)
    loop.steps += step
    watch.event(scaler, "steps", optimizer)
    watch.event(scaler, "updates")


def test_skipped_steps_are_those_the_optimizer_did_not_take():
    watch, loops, facts = scaling()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    loops[id(optimizer)] = loop = SimpleNamespace(steps=0)
    for taken in (False, False, True, True):
        cycle(watch, scaler, optimizer, loop, taken)
    watch.finish()
    (_, row), = facts
    assert (row["steps"], row["skipped"], row["longest"], row["first_skips"], row["direct"]) == (4, 2, 2, 2, 0)


def test_a_step_beside_the_scaler_is_counted():
    watch, loops, facts = scaling()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    loops[id(optimizer)] = loop = SimpleNamespace(steps=0)
    for _ in range(3):
        cycle(watch, scaler, optimizer, loop)
        loop.steps += 1
    watch.finish()
    assert facts[0][1]["direct"] == 2 and facts[0][1]["skipped"] == 0


def test_scalers_of_one_line_are_one_row():
    watch, loops, facts = scaling()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    loops[id(optimizer)] = loop = SimpleNamespace(steps=0)
    for _ in range(3):
        scaler = torch.amp.GradScaler("cpu")
        watch.constructed(scaler)
        cycle(watch, scaler, optimizer, loop)
    watch.finish()
    assert [row["instances"] for _, row in facts] == [3]


def test_an_overflow_of_finite_operands_is_told_and_a_mask_is_not():
    x = torch.tensor([1.0, 300.0], dtype=torch.float16)
    assert half_figures("pow", (x, 2), {}, x**2)["overflow"]["nonfinite"] == 1
    assert half_figures("masked_fill", (x, x > 2, float("-inf")), {}, x.masked_fill(x > 2, float("-inf"))) == {}
    assert half_figures("pow", (x.float(), 2), {}, x.float() ** 2) == {}


@pytest.mark.parametrize(("lr", "stuck"), [(1e-6, True), (1.0, False)])
def test_the_share_of_weights_that_stand_still(lr, stuck):
    watched, facts = session()
    halves = Halves(watched)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    weights = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=lr).step()
    halves.look(0, list(model.parameters()), weights, grads, [p.detach() - w for p, w in zip(model.parameters(), weights, strict=True)])
    halves.finish()
    (kind, row), = facts
    assert kind == "half-weights" and row["dtype"] == "bfloat16" and (row["samples"][0][1] > 0.9) is stuck
