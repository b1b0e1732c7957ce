"""State dicts that were read and never applied, and those applied under other names."""

from types import SimpleNamespace

import torch
from torch import nn

from osler.watch.taps.checkpoints import Checkpoints


def watched(*roots):
    facts = []
    registry = SimpleNamespace(roots=lambda: list(roots), module_id=lambda m: 7, loaded=set(), uid=id)
    session = SimpleNamespace(finishers=[], writer=object(), registry=registry, fact=lambda kind, at, **data: facts.append((kind, data)))
    return Checkpoints(session), roots, facts


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_model_that_is_gone_at_the_end_is_remembered():
    model = net()
    states, _, facts = watched(model)
    states.loaded_file({"encoder": net().state_dict(), "epoch": 3})
    states.still_there()
    states.session.registry.roots = list
    states.finish()
    assert [(kind, data["name"], data["class"]) for kind, data in facts] == [("state-unused", "encoder", "Sequential")]


def test_values_applied_under_other_names_are_applied():
    model, holder = net(), nn.ModuleDict({"backbone": net()})
    states, _, facts = watched(model)
    read = {f"enc.{k}": v for k, v in net().state_dict().items()}
    states.loaded_file(read)
    states.read[0]["fits"] = {"class": "Sequential"}
    given = {k.replace("enc.", "backbone."): v for k, v in read.items()}
    states.applied(holder, given, {k: tuple(v.shape) for k, v in holder.state_dict().items()}, True)
    states.finish()
    assert [kind for kind, _ in facts] == ["load-state-dict"] and torch.is_tensor(read["enc.0.weight"])
