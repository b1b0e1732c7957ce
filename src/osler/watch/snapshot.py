"""The registration snapshot: modules, parameters and what is held outside of registration, as facts."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from osler.watch.readout import on_cpu, scalar, true
from osler.watch.registry import Registry, attributes, library_class
from osler.watch.session import Session

MAX_MODULES, MAX_ITEMS = 3000, 200
SAMPLE, DEVICE_SAMPLE = 1 << 16, 1 << 12
MAX_LATER = 1000


def initialisation(parameter: torch.Tensor, owner: nn.Module, name: str) -> dict[str, Any] | None:
    """How the values look: figures, constant or not, and whether they are torch's own fresh initialisation.

    ``default`` is ``kaiming_uniform`` (Linear and convolutions: uniform within 1/sqrt(fan_in)), ``normal`` (Embedding), else
    ``None``. A sample of 65536 elements is looked at; CPU tensors only.
    """
    values = sample(parameter)
    return describe(values, parameter.shape, owner, name) if values is not None and on_cpu(values) else None


def sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """Some of its values, flat; fewer where they have to cross from a device."""
    if parameter.numel() == 0 or not parameter.is_floating_point() or parameter.device.type == "meta":
        return None
    size = SAMPLE if on_cpu(parameter) else DEVICE_SAMPLE
    values = parameter.detach().flatten()
    return values if values.numel() <= size else values[:: values.numel() // size]


def describe(values: torch.Tensor, shape: torch.Size, owner: nn.Module, name: str) -> dict[str, Any]:
    """The figures of a flat sample [values] on the host."""
    low, high = scalar(values.min()), scalar(values.max())
    std = scalar(values.float().std(unbiased=False)) if values.numel() > 1 else 0.0
    figures: dict[str, Any] = {"mean": scalar(values.float().mean()), "std": std, "absmax": max(abs(low), abs(high)),
                               "constant": low == high, "default": None}
    if name == "weight" and isinstance(owner, nn.Linear | nn.modules.conv._ConvNd) and values.numel() >= 16:
        fan_in = math.prod(shape[1:]) if not getattr(owner, "transposed", False) else shape[1] * math.prod(shape[2:])
        bound = 1 / math.sqrt(max(fan_in, 1))
        spread = 4 / math.sqrt(values.numel())
        if figures["absmax"] <= bound * 1.0001 and abs(std / (bound / math.sqrt(3)) - 1) < max(0.05, spread):
            figures["default"] = "kaiming_uniform"
        figures["fan_in"] = fan_in
    elif name == "weight" and isinstance(owner, nn.Embedding) and values.numel() >= 64 and abs(std - 1) < 0.1:
        figures["default"] = "normal"
    return figures


def outside(module: nn.Module, registry: Registry) -> list[dict[str, Any]]:
    """Modules and trainable tensors that ``module`` holds outside its registration."""
    found: list[dict[str, Any]] = []
    for attribute, value in list(module.__dict__.items()):
        if attribute in ("_parameters", "_buffers", "_modules") or attribute.endswith("_hooks"):
            continue
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                kind = "tensor" if value.is_leaf else "non-leaf tensor"
                found.append({"attribute": attribute, "kind": kind, "items": 1, "numel": value.numel(), "uids": [registry.uid(value)]})
        elif isinstance(value, list | tuple | dict) and value:
            items = list(value.values()) if isinstance(value, dict) else list(value)
            modules = [v for v in items[:500] if isinstance(v, nn.Module)]
            tensors = [v for v in items[:500] if isinstance(v, torch.Tensor) and v.requires_grad]
            parameters = [p for m in modules for p in m.parameters()]
            kind = "dict" if isinstance(value, dict) else "list"
            if parameters:
                found.append({"attribute": attribute, "kind": f"module in {kind}", "items": len(modules), "numel": sum(p.numel() for p in parameters),
                              "uids": [registry.uid(p) for p in parameters], "first": modules[0]})
            elif tensors:
                found.append({"attribute": attribute, "kind": f"tensor in {kind}", "items": len(tensors), "numel": sum(t.numel() for t in tensors),
                              "uids": [registry.uid(t) for t in tensors]})
    return found


def take(session: Session, optimized: dict[int, int], reached: Collection[int]) -> None:
    """Write the facts ``modules``, ``params`` and ``unregistered``.

    Args:
        session: the watched process.
        optimized: parameter uid to optimizer index.
        reached: uids that the loss reaches.
    """
    registry = session.registry
    wanted = set(optimized) | set(reached)
    roots = [r for r in registry.roots() if any(registry.known_uid(p) in wanted for p in r.parameters())][:20]
    module_rows: list[dict[str, Any]] = []
    param_rows: list[dict[str, Any]] = []
    later: list[tuple[int, torch.Tensor, torch.Size, nn.Module, str]] = []
    seen: set[int] = set()
    for root in roots:
        root_id = registry.module_id(root)
        for name, module in root.named_modules():
            if len(module_rows) >= MAX_MODULES:
                break
            at = registry.built_at(module)
            direct = []
            for own, parameter in module._parameters.items():
                if parameter is None:
                    continue
                uid = registry.uid(parameter)
                direct.append(uid)
                if uid in seen:
                    continue
                seen.add(uid)
                param_rows.append({"uid": uid, "name": f"{name}.{own}" if name else own, "module": registry.module_id(module),
                                   "root": root_id, "shape": list(parameter.shape), "dtype": str(parameter.dtype).removeprefix("torch."),
                                   "requires_grad": parameter.requires_grad, "leaf": parameter.is_leaf,
                                   "optimizer": optimized.get(uid), "loaded": uid in registry.loaded, "stepped": uid in registry.stepped,
                                   "init": initialisation(parameter, module, own)})
                if not on_cpu(parameter) and len(later) < MAX_LATER and (values := sample(parameter)) is not None:
                    later.append((len(param_rows) - 1, values, parameter.shape, module, own))
            library = library_class(module)
            module_rows.append({"id": registry.module_id(module), "root": root_id, "name": name, "class": type(module).__name__,
                                "at": at.to_json() if at else None, "library": library, "training": module.training,
                                "attrs": attributes(module), "direct": direct})
            if not library:
                for item in outside(module, registry):
                    first = item.pop("first", None)
                    session.fact("unregistered", registry.built_at(first) if first is not None else at,
                                 holder=registry.module_id(module), **{"class": type(module).__name__}, root=root_id,
                                 **{**item, "uids": item["uids"][:MAX_ITEMS], "uids_total": len(item["uids"])})
    session.fact("modules", roots=[{"id": registry.module_id(r), "class": type(r).__name__, "at": _json(registry.built_at(r))} for r in roots],
                 modules=module_rows)
    session.fact("params", params=param_rows)
    if later:
        bring(session, later, param_rows)
    twins(session, roots)


def bring(session: Session, later: list[tuple[int, torch.Tensor, torch.Size, nn.Module, str]], rows: list[dict[str, Any]]) -> None:
    """The fact ``params`` once more when samples of the values have come from the device."""
    fitting = [item for item in later if item[1].device == later[0][1].device]

    def arrived(*copies: torch.Tensor) -> None:
        for (index, _, shape, module, own), values in zip(fitting, copies, strict=True):
            rows[index]["init"] = describe(values, shape, module, own)
        session.fact("params", params=rows)

    session.courier.carry([item[1] for item in fitting], arrived)


def twins(session: Session, roots: list[nn.Module]) -> None:
    """Embeddings and linear layers of one root with equal values but separate parameters: once meant to be tied."""
    for root in roots:
        named = list(root.named_modules())
        embeddings = [(n, m) for n, m in named if isinstance(m, nn.Embedding) and m.weight.numel() <= 1 << 23]
        linears = [(n, m) for n, m in named if isinstance(m, nn.Linear)]
        for first, a in embeddings[:20]:
            for second, b in linears:
                x, y = a.weight.detach(), b.weight.detach()
                if x is y or a.weight is b.weight or x.shape != y.shape or not on_cpu(x) or not on_cpu(y):
                    continue
                if true((x == y).all()) and not true((x == x.flatten()[0]).all()):
                    shared = x.data_ptr() == y.data_ptr()
                    session.fact("twins", session.registry.built_at(b), a=f"{first}.weight", b=f"{second}.weight", shape=list(x.shape),
                                 shared_storage=shared, root=session.registry.module_id(root))


def _json(at: Any) -> Any:
    return at.to_json() if at is not None else None
