"""Checkpoints: what was read, what was applied, and whether it was still there when training began."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from osler.core.facts import Location
from osler.watch.compiler import passing, quiet
from osler.watch.session import Session
from osler.watch.where import user_line

MAX_NAMES = 200
KEPT = 8


class Checkpoints:
    """State dicts on their way from a file into a model."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.read: list[dict[str, Any]] = []
        self.versions: dict[int, int] = {}
        self.told: dict[str, int] = {}
        session.finishers.append(self.finish)

    @quiet
    def loaded_file(self, result: Any) -> None:
        """``torch.load`` returned; state dicts one level down count too."""
        if not isinstance(result, Mapping) or len(self.read) >= KEPT:
            return
        candidates = [("", result), *((str(k), v) for k, v in result.items() if isinstance(v, Mapping))]
        for name, state in candidates:
            shapes = {str(k): tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor)}
            if len(shapes) >= 2:
                self.read.append({"name": name, "shapes": shapes, "applied": False, "at": user_line(), "fits": None,
                                  "places": {v.data_ptr() for v in state.values() if isinstance(v, torch.Tensor) and v.numel()}})

    @quiet
    def contents(self, kind: str, value: Any) -> None:
        """What a file holds that was written (`file-saved`) or read (`file-read`): its entries, and which of them are whose state."""
        at = user_line()
        key = f"{kind}|{at}"
        self.told[key] = self.told.get(key, 0) + 1
        if not isinstance(value, Mapping) or self.told[key] > 2 or len(self.told) > 40:
            return
        self.session.fact(kind, at, keys=[str(k) for k in list(value)[:60]], what={str(k): state_kind(v) for k, v in list(value.items())[:60]},
                          whole=state_kind(value))

    @quiet
    def restored(self, what: str, owner: Any) -> None:
        """``load_state_dict`` of an optimizer, a scheduler or a scaler."""
        at = user_line()
        key = f"{what}|{at}"
        self.told[key] = self.told.get(key, 0) + 1
        if self.told[key] <= 3 and len(self.told) <= 40:
            self.session.fact("state-loaded", at, what=what, **{"class": type(owner).__name__})

    @quiet
    def applied(self, module: nn.Module, state: Mapping[str, Any], expected: dict[str, tuple[int, ...]], strict: bool) -> None:
        session, registry = self.session, self.session.registry
        given = {str(k): tuple(v.shape) if isinstance(v, torch.Tensor) else () for k, v in dict(state).items()}
        for row in self.read:
            common = [k for k in row["shapes"] if any(g == k or g.endswith(k) or k.endswith(g) for g in ((k,) if k in given else given))]
            same = sum(isinstance(v, torch.Tensor) and v.numel() > 0 and v.data_ptr() in row["places"] for v in dict(state).values())  # under other names
            if max(len(common), same) * 2 >= len(row["shapes"]):
                row["applied"] = True
        matched = [k for k in expected if k in given and given[k] == expected[k]]
        missing = [k for k in expected if k not in given]
        unexpected = [k for k in given if k not in expected]
        wrong = [k for k in expected if k in given and given[k] != expected[k]]
        numel = {name: t.numel() for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
        own = {name: t.data_ptr() for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor) and t.numel()}
        aliased = sum(isinstance(v, torch.Tensor) and v.data_ptr() == own.get(str(k)) for k, v in dict(state).items())
        for name, parameter in module.named_parameters():
            if name in given:
                uid = registry.uid(parameter)
                registry.loaded.add(uid)
                self.versions[uid] = parameter._version
        session.fact("load-state-dict", user_line(), root=registry.module_id(module), strict=strict, matched=len(matched), expected=len(expected), aliased=aliased,
                     missing=missing[:MAX_NAMES], missing_total=len(missing), unexpected=unexpected[:MAX_NAMES], unexpected_total=len(unexpected),
                     shape_mismatch=wrong[:MAX_NAMES], matched_numel=sum(numel.get(k, 0) for k in matched), expected_numel=sum(numel.values()),
                     **{"class": type(module).__name__})

    def still_there(self) -> None:
        """Before the first step: have values set by ``load_state_dict`` been written over since?"""
        registry = self.session.registry
        self._fit()
        if not self.versions:
            return
        owned = registry.owners(registry.roots())
        changed: dict[int, list[str]] = {}
        total: dict[int, int] = {}
        for key, (root, module, name) in owned.items():
            parameter = module._parameters.get(name.rsplit(".", 1)[-1])
            if parameter is None or id(parameter) != key:
                continue
            uid = registry.known_uid(parameter)
            if uid in self.versions and uid not in registry.stepped:
                number = registry.module_id(root)
                total[number] = total.get(number, 0) + 1
                if parameter._version != self.versions[uid]:
                    changed.setdefault(number, []).append(name)
        for number, names in changed.items():
            self.session.fact("loaded-then-changed", None, root=number, names=names[:MAX_NAMES], share=len(names) / total[number])
        self.versions = {}

    @quiet
    def finish(self) -> None:
        if self.session.writer is None:
            return
        self._fit()
        for row in self.read:
            if not row["applied"] and row["fits"] is not None:
                at: Location | None = row["at"]
                self.session.fact("state-unused", at, name=row["name"], **row["fits"])

    def _fit(self) -> None:
        """Which trained root each unused state dict fits; asked before training, as a function's own model may be gone at the end."""
        rows = [row for row in self.read if not row["applied"] and row["fits"] is None]
        for root in self.session.registry.roots() if rows else ():
            own = {k: tuple(v.shape) for k, v in root.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
            for row in rows:
                shared = [k for k, shape in row["shapes"].items() if own.get(k) == shape]
                if row["fits"] is None and len(shared) * 2 >= len(own) > 1:
                    row["fits"] = {"root": self.session.registry.module_id(root), "keys": len(shared), "expected": len(own), "class": type(root).__name__}


def state_kind(value: Any) -> str:
    """Whose state this is, told by its entries: ``optimizer``, ``scheduler``, ``scaler``, ``model``, ``mapping``, ``tensor``, ``number`` or ``other``."""
    if isinstance(value, Mapping):
        if "param_groups" in value and "state" in value:
            return "optimizer"
        if "last_epoch" in value or "_last_lr" in value or "num_bad_epochs" in value:
            return "scheduler"
        if "scale" in value and "growth_factor" in value:
            return "scaler"
        tensors = sum(isinstance(v, torch.Tensor) for v in value.values())
        return "model" if tensors and tensors * 2 >= len(value) else "mapping"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, nn.Module):
        return "module"
    return "number" if isinstance(value, int | float) else "other"


def install(session: Session, checkpoints: Checkpoints) -> None:
    guard = session.guard
    original_load = nn.Module.load_state_dict

    @functools.wraps(original_load)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        expected = None
        if guard.armed("load"):
            try:
                expected = {name: tuple(t.shape) for name, t in self.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
            except Exception:
                guard.failed("load")
        result = original_load(self, state_dict, *args, **kwargs)
        if expected is not None:
            try:
                checkpoints.applied(self, state_dict, expected, bool(kwargs.get("strict", args[0] if args else True)))
            except Exception:
                guard.failed("load")
        return result

    nn.Module.load_state_dict = passing(load_state_dict)
    original_file = torch.load

    @functools.wraps(original_file)
    def load(*args: Any, **kwargs: Any) -> Any:
        result = original_file(*args, **kwargs)
        if guard.armed("load"):
            try:
                checkpoints.loaded_file(result)
                checkpoints.contents("file-read", result)
            except Exception:
                guard.failed("load")
        return result

    torch.load = passing(load)
    original_save = torch.save

    @functools.wraps(original_save)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if guard.armed("load"):
            try:
                checkpoints.contents("file-saved", obj)
            except Exception:
                guard.failed("load")
        return original_save(obj, *args, **kwargs)

    torch.save = passing(save)
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
    for cls, what in ((torch.optim.Optimizer, "optimizer"), (LRScheduler, "scheduler"), (ReduceLROnPlateau, "scheduler"), (torch.amp.GradScaler, "scaler")):
        if "load_state_dict" in cls.__dict__:
            cls.load_state_dict = _telling(session, checkpoints, cls.load_state_dict, what)


def _telling(session: Session, checkpoints: Checkpoints, original: Any, what: str) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if session.guard.armed("load"):
            try:
                checkpoints.restored(what, self)
            except Exception:
                session.guard.failed("load")
        return result

    return passing(load_state_dict)
