"""Tensors inside tuples, lists, mappings and dataclasses: list them with their path, or put others in their place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Path = tuple[Any, ...]
MAX_ITEMS = 256
MAX_DEPTH = 5


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors with the keys that lead to them; what is nested too deep or in unknown objects is left out."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif len(path) < MAX_DEPTH:
        for key, item in _children(tree):
            yield from leaves(item, (*path, key))


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, list | tuple):
        if len(tree) <= MAX_ITEMS:
            yield from enumerate(tree)
    elif isinstance(tree, Mapping):
        if len(tree) <= MAX_ITEMS:
            yield from tree.items()
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        yield from ((f.name, getattr(tree, f.name, None)) for f in dataclasses.fields(tree))


def replaced(tree: Any, new: dict[Path, torch.Tensor], path: Path = ()) -> Any:
    """A copy of the containers of ``tree`` with the tensors at the given paths exchanged; other objects stay the same."""
    if path in new:
        return new[path]
    if not any(p[: len(path)] == path for p in new):
        return tree
    items = {key: replaced(item, new, (*path, key)) for key, item in _children(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*items.values())
    if isinstance(tree, tuple):
        return tuple(items.values())
    if isinstance(tree, list):
        return list(items.values())
    twin = copy.copy(tree)
    for key, item in items.items():
        if isinstance(tree, Mapping):
            twin[key] = item
        else:
            object.__setattr__(twin, key, item)
    return twin
