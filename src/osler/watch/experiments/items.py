"""``item-repeat``: does a dataset give the same item twice, given the same random state?"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from osler.core.facts import Location
from osler.watch.experiments.nested import leaves
from osler.watch.experiments.subject import figure, reseed
from osler.watch.where import is_user, shorten

SLOW = 1.0
MAX_NODES = 64
CLOSED = ""
"""Ends the list of files that an item opened."""


def item_repeat(index: int, loader: Any) -> dict[str, Any] | None:
    """Fetches a few items again and again; ``None`` for datasets that cannot be asked for an item.

    ``same``: equal random states gave equal items. If not, ``change`` is the ratio of standard deviations and ``moved`` the shift of
    the mean in units of the first one's. ``random``: other states gave other items. ``uses``: the global generators that an item advances.
    ``took`` and ``again``: seconds of the first and the second fetch of each index, ``work`` the processor's part of the second; ``files``: the files each index opened.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    row: dict[str, Any] = {"loader": index, "dataset": type(dataset).__name__, "same": True, "change": None, "moved": None, "random": False, "uses": [],
                           "own_generator": False, "items": 0, "took": [], "again": [], "work": [], "files": [],
                           "at": _getitem_line(dataset)}
    generators = list(_generators(dataset))
    row["own_generator"] = bool(generators)
    uses: set[str] = set()
    for position in dict.fromkeys((0, len(dataset) // 2, len(dataset) - 1)):
        reseed(0)
        states = [_state(g) for g in generators]
        before = _global()
        opened = _opened()
        begin = perf_counter()
        one = _numbers(dataset[position])
        took = perf_counter() - begin
        row["took"].append(round(took, 6))
        row["files"].append(opened[:8])
        opened.append(CLOSED)
        uses |= {name for name, state in _global().items() if state != before[name]}
        reseed(0)
        for generator, state in zip(generators, states, strict=True):
            _restore(generator, state)
        begin, works = perf_counter(), process_time()
        two = _numbers(dataset[position])
        row["again"].append(round(perf_counter() - begin, 6))
        row["work"].append(round(process_time() - works, 6))
        row["items"] += 1
        if one is None or two is None:
            row |= {"same": None}
            break
        if not _equal(one, two):
            row |= {"same": False, **_change(one, two)}
            break
        reseed(1)
        row["random"] = row["random"] or not _equal(two, _numbers(dataset[position]))
        if took > SLOW:
            break
    row["uses"] = sorted(uses)
    return row


def _opened() -> list[str]:
    """A list that fills with the names of files as they are opened, until it holds ``CLOSED``. Audit hooks stay for good, but
    so short is this process's life."""
    names: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and len(names) < 64 and CLOSED not in names and isinstance(args[0], str | bytes | os.PathLike):
            names.append(os.fsdecode(args[0]))

    sys.addaudithook(note)
    return names


def _getitem_line(dataset: Any) -> list[Any] | None:
    """The definition of the innermost dataset's ``__getitem__``, where it is the user's."""
    for _ in range(4):
        code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        if code is not None and is_user(code):
            return Location(shorten(code.co_filename), code.co_firstlineno, "__getitem__").to_json()
        dataset = getattr(dataset, "dataset", None)
    return None


def _numbers(item: Any) -> list[np.ndarray[Any, Any]] | None:
    """The numeric content of an item, ``None`` where there is none."""
    found = [t.detach().cpu().to_dense().float().numpy() if t.dtype == torch.bfloat16 else np.array(t.detach().cpu().to_dense()) for _, t in leaves(item)]
    queue = [item]
    while queue and len(found) < MAX_NODES:
        value = queue.pop(0)
        if isinstance(value, list | tuple) and len(value) < MAX_NODES:
            queue.extend(value)
        elif isinstance(value, dict):
            queue.extend(value.values())
        elif not isinstance(value, torch.Tensor) and (isinstance(value, int | float | np.generic) or hasattr(value, "__array_interface__")):
            found.append(np.array(value))
    return [a for a in found if a.dtype.kind in "fiubc"] or None


def _equal(a: list[np.ndarray[Any, Any]], b: list[np.ndarray[Any, Any]] | None) -> bool:
    return b is not None and len(a) == len(b) and all(x.shape == y.shape and np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
                                                      for x, y in zip(a, b, strict=True))


def _change(a: list[np.ndarray[Any, Any]], b: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
    for x, y in zip(a, b, strict=False):
        if x.shape == y.shape and x.size > 1 and not np.array_equal(x, y):
            old, new = float(np.std(x)), float(np.std(y))
            return {"change": figure(new / old if old else float("inf")), "moved": figure((float(np.mean(y)) - float(np.mean(x))) / (old or 1.0))}
    return {}


def _global() -> dict[str, Any]:
    name, keys, place, has, cached = np.random.get_state(legacy=True)
    return {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate(), "numpy": (name, np.asarray(keys).tobytes(), place, has, cached)}


def _generators(holder: Any) -> Iterator[Any]:
    """Random generators that the dataset, its wrapped datasets or its transforms own."""
    seen: set[int] = set()
    queue = [(holder, 0)]
    while queue and len(seen) < MAX_NODES:
        value, depth = queue.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, np.random.Generator | np.random.RandomState | torch.Generator | random.Random):
            yield value
        elif isinstance(value, list | tuple) and len(value) < MAX_NODES:
            queue.extend((v, depth) for v in value if hasattr(v, "__dict__") or isinstance(v, np.random.Generator | np.random.RandomState | torch.Generator))
        elif depth < 3 and hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
            queue.extend((v, depth + 1) for v in list(vars(value).values()) if not isinstance(v, str | int | float | torch.Tensor | np.ndarray))


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
