"""Who is who: live modules with their construction lines, parameter uids, owners and roots."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from osler.core.facts import Location


class Registry:
    """Numbers parameters and modules in order of first sight; holds only weak references."""

    def __init__(self) -> None:
        self._built: dict[int, tuple[weakref.ref[nn.Module], Location | None]] = {}
        self._module_ids: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._uids: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._next_module = 0
        self._next_uid = 0
        self.loaded: set[int] = set()
        self.stepped: set[int] = set()

    def built(self, module: nn.Module, at: Location | None) -> None:
        self._built[id(module)] = (weakref.ref(module), at)

    def built_at(self, module: nn.Module) -> Location | None:
        entry = self._built.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def modules(self) -> Iterator[nn.Module]:
        """Live modules whose construction was seen (dead entries are dropped on the way)."""
        for key, (ref, _) in list(self._built.items()):
            module = ref()
            if module is None:
                self._built.pop(key, None)
            else:
                yield module

    def module_id(self, module: nn.Module) -> int:
        entry = self._module_ids.get(id(module))
        if entry is not None and entry[0]() is module:
            return entry[1]
        self._module_ids[id(module)] = (weakref.ref(module), self._next_module)
        self._next_module += 1
        return self._next_module - 1

    def uid(self, tensor: torch.Tensor) -> int:
        entry = self._uids.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        self._uids[id(tensor)] = (weakref.ref(tensor), self._next_uid)
        self._next_uid += 1
        return self._next_uid - 1

    def known_uid(self, tensor: torch.Tensor) -> int:
        """The uid if this tensor has been numbered, else -1."""
        entry = self._uids.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else -1

    def tensor(self, uid: int) -> torch.Tensor | None:
        for ref, number in self._uids.values():
            if number == uid:
                return ref()
        return None

    def roots(self) -> list[nn.Module]:
        """Live modules that are no other module's child and own at least one parameter somewhere."""
        live = list(self.modules())
        children = {id(child) for module in live for child in module._modules.values() if child is not None}
        return [m for m in live if id(m) not in children and next(m.parameters(), None) is not None]

    def owners(self, roots: Iterable[nn.Module]) -> dict[int, tuple[nn.Module, nn.Module, str]]:
        """id(parameter) -> (root, owner module, dotted name from the root)."""
        found: dict[int, tuple[nn.Module, nn.Module, str]] = {}
        for root in roots:
            for prefix, module in root.named_modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        found.setdefault(id(parameter), (root, module, f"{prefix}.{name}" if prefix else name))
        return found


ATTRIBUTES = ("p", "momentum", "eps", "num_features", "batch_first", "bidirectional", "padding_idx", "dim", "inplace",
              "track_running_stats", "normalized_shape", "in_features", "out_features", "in_channels", "out_channels", "kernel_size",
              "num_heads", "embed_dim", "num_embeddings", "embedding_dim", "hidden_size", "input_size", "num_layers", "negative_slope",
              "affine", "num_groups", "dropout", "norm_first", "bias")


def attributes(module: nn.Module) -> dict[str, Any]:
    """Plain configuration values of a module."""
    found: dict[str, Any] = {}
    for name in ATTRIBUTES:
        value = module.__dict__.get(name)
        if isinstance(value, bool | int | float | str):
            found[name] = value
        elif isinstance(value, tuple) and all(isinstance(v, int) for v in value):
            found[name] = list(value)
    return found


def library_class(module: nn.Module) -> bool:
    """Whether the class comes from torch or another installed package."""
    import sys
    source = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    return "site-packages" in source or "dist-packages" in source
