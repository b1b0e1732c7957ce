"""Rows and vectors that the user's frames hold, for runs without loaders (see ``table``)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from osler.watch.experiments.table_questions import keys as row_keys
from osler.watch.experiments.table_rows import Array, Rows, flat, numbers_of, target_of, vector_of
from osler.watch.where import is_user

SAYS_TRAIN = re.compile(r"(^|_|\.|[xX])(tr|trn|train|training|fit)(_|$|\d|[A-Z]|idx|ids|ind|rows|set|mask|x|data)")
SAYS_JUDGED = re.compile(r"(^|_|\.|[xX])(va|val|vl|valid|validation|te|test|tst|dev|eval|hold|holdout)(_|$|\d|[A-Z]|idx|ids|ind|rows|set|mask|x|data|out)")


def holdings_of(frame: Any) -> Iterator[tuple[str, Any]]:
    """Arrays and tensors with at least 20 rows that the user's frames hold, by name; objects and mappings are looked into once."""
    seen: set[int] = set()
    scopes: list[dict[str, Any]] = []
    while frame is not None:
        if is_user(frame.f_code):
            scopes += [frame.f_locals, frame.f_globals] if frame.f_locals is not frame.f_globals else [frame.f_globals]
        frame = frame.f_back
    main = sys.modules.get("__main__")
    scopes += [vars(main)] if main is not None else []
    count = 0
    for scope in scopes:
        for name, value in list(scope.items()):
            if name.startswith("__") or (id(value) in seen and not _sized(value)) or count > 3000:
                continue
            seen.add(id(value))
            inner = value.items() if isinstance(value, dict) else vars(value).items() if _plain_object(value) else ()
            for key, thing in ((name, value), *((f"{name}.{k}", v) for k, v in list(inner)[:60] if isinstance(k, str))):
                count += 1
                if _sized(thing):
                    yield key, thing
            if isinstance(value, list | tuple) and 2 <= len(value) <= 6:
                yield from ((f"{name}.{i}", v) for i, v in enumerate(value) if _sized(v))


def _plain_object(value: Any) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor | torch.nn.Module) and not callable(value) \
        and kind.__module__.split(".")[0] in ("__main__", getattr(sys.modules.get("__main__"), "__name__", "__main__"))


def _sized(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and not value.is_sparse and value.dim() >= 1 and value.shape[0] >= 20 and not value.requires_grad and value.numel() <= 1 << 25
    if isinstance(value, np.ndarray):
        return value.ndim >= 1 and value.shape[0] >= 20 and value.size <= 1 << 25
    if isinstance(value, list) and 2 <= len(value) <= 4096 and all(isinstance(v, str) for v in value):
        return True
    if isinstance(value, list):
        return len(value) >= 20 and isinstance(value[0], int | str | float) and len(value) <= 1 << 20
    return type(value).__name__ in ("DataFrame", "Series") and len(value) >= 20


@dataclass
class Sides:
    """What frames tell: both sides, the rows whose targets were seen, the share of training rows in each table named for validation.
    ``between``: what both sides are called (empty: a batch, or what the model was called with). ``apart``: the training side is what is left of a table without the judged rows, so equal rows cannot be asked for."""

    train: Rows | None = None
    other: Rows | None = None
    labelled: Rows | None = None
    common: dict[str, float] = field(default_factory=dict)
    apart: bool = False
    between: tuple[str, str] = ("", "")


def from_frames(seen: list[tuple[Any, Any]], judged: Any, holdings: dict[str, Any]) -> Sides:
    """Both sides without loaders. Rows that nothing names are believed only where every step got the same ones."""
    batches = [(x, numbers_of(y)) for raw, y in seen if (x := numbers_of(raw)) is not None and x.ndim >= 2 and len(x) >= 2]
    if not batches:
        return Sides()
    width = batches[0][0].shape[1:]
    batches = [(x, y) for x, y in batches if x.shape[1:] == width]
    got = np.concatenate([flat(x) for x, _ in batches])
    targets = [y for x, y in batches if y is not None and len(y) == len(x)]
    goals: Array | None = np.concatenate(targets) if len(targets) == len(batches) and len({y.shape[1:] for y in targets}) == 1 else None
    keys = row_keys(got)
    _, first = np.unique(keys, return_index=True)
    labelled = Rows(got[first], target_of(goals)[first] if goals is not None else None)
    tables = {name: flat(a) for name, v in holdings.items() if (a := numbers_of(v)) is not None and a.ndim >= 2 and a.shape[1:] == width and a.size <= 1 << 23}
    if len(width) == 1:  # tables whose last columns are the targets
        tables |= {name: flat(a[:, :width[0]]) for name, v in holdings.items()
                   if (a := numbers_of(v)) is not None and a.ndim == 2 and 1 <= a.shape[1] - width[0] <= 3 and width[0] >= 4 and a.size <= 1 << 23}
    named = [n for n, t in tables.items() if SAYS_TRAIN.search(n) and not SAYS_JUDGED.search(n) and np.isin(keys, row_keys(t)).mean() > 0.95]
    whole = len(batches) > 1 and all(len(x) == len(batches[0][0]) for x, _ in batches) and len(first) <= len(batches[0][0])
    train = labelled
    if named:
        best = max(named, key=lambda n: -len(tables[n]))
        train = Rows(tables[best], _partner(best, len(tables[best]), holdings))
    own = row_keys(train.x)
    given = numbers_of(judged)
    candidates = [("", flat(given))] if given is not None and given.ndim >= 2 and given.shape[1:] == width and (named or whole) else []
    candidates += [(n, tables[n]) for n in tables if SAYS_JUDGED.search(n) and not SAYS_TRAIN.search(n)]
    shares = {n: float(np.isin(row_keys(t), own).mean()) for n, t in candidates if len(t) >= 5}
    common = {n: round(share, 4) for n, share in shares.items() if n}
    judging = next((n for n, t in candidates if shares.get(n, 1.0) < 0.98), None)
    other = next((Rows(t, _partner(n, len(t), holdings) if n else None) for n, t in candidates if n == judging), None)
    between = (max(named, key=lambda n: -len(tables[n])) if named else "", judging or "")
    if (other is None or not named) and (both := _by_index(tables, holdings, keys)) is not None:
        train, other, between = both
    if other is None and not named and given is not None and given.shape[1:] == width and (rest := _rest(tables, keys, flat(given), holdings)) is not None:
        return Sides(*rest, labelled, common, apart=True)
    return Sides(train, other, labelled, common, between=between)


def _rest(tables: dict[str, Array], keys: Array, judged: Array, holdings: dict[str, Any]) -> tuple[Rows, Rows] | None:
    """One table that holds the training batches and, elsewhere, the judged rows: what is not judged counts as trained on.

    Believed only where the judged rows, were they training rows, would have been expected among the batches."""
    own = row_keys(judged)
    if np.isin(own, keys).any() or len(np.unique(own)) < 5:
        return None
    for name, t in tables.items():
        whole = row_keys(t)
        if np.isin(keys, whole).mean() < 0.98 or np.isin(own, whole).mean() < 0.98 or len(np.unique(keys)) * len(own) < 8 * len(t) or len(np.unique(whole)) < len(whole):
            continue
        one, two = np.flatnonzero(~np.isin(whole, own)), np.flatnonzero(np.isin(whole, own))
        y = _partner(name, len(t), holdings)
        sides = Rows(t[one], y[one] if y is not None else None, one), Rows(t[two], y[two] if y is not None else None, two)
        add_vectors(*sides, len(t), holdings)
        return sides
    return None


def _by_index(tables: dict[str, Array], holdings: dict[str, Any], keys: Array) -> tuple[Rows, Rows, tuple[str, str]] | None:
    """One table and two named index vectors (or masks) into it."""
    picks = {n: v for n, raw in holdings.items() if (v := vector_of(raw)) is not None and v.dtype.kind in "biu"}
    for name, t in tables.items():
        for left, a in picks.items():
            if not SAYS_TRAIN.search(left) or SAYS_JUDGED.search(left) or (one := _places(a, len(t))) is None or np.isin(keys, row_keys(t[one])).mean() <= 0.9:
                continue
            for right, b in picks.items():
                if SAYS_JUDGED.search(right) and not SAYS_TRAIN.search(right) and (two := _places(b, len(t))) is not None:
                    y = _partner(name, len(t), holdings)
                    sides = Rows(t[one], y[one] if y is not None else None, one), Rows(t[two], y[two] if y is not None else None, two)
                    add_vectors(*sides, len(t), holdings)
                    return *sides, (left, right)
    return None


def add_vectors(train: Rows, other: Rows, count: int, holdings: dict[str, Any]) -> None:
    """Vectors of the user's that have an entry for each row of the whole table, at the places of both sides."""
    for name, raw in holdings.items():
        vector = vector_of(raw)
        if vector is not None and len(vector) == count and train.order is not None and other.order is not None:
            train.vectors.setdefault(name, vector[train.order])
            other.vectors.setdefault(name, vector[other.order])


def _places(v: Array, count: int) -> Array | None:
    if v.dtype.kind == "b":
        return np.flatnonzero(v) if len(v) == count and v.sum() >= 5 else None
    return v.astype(np.int64) if len(v) and int(v.min()) >= 0 and int(v.max()) < count and len(np.unique(v)) == len(v) else None


def _partner(name: str, count: int, holdings: dict[str, Any]) -> Array | None:
    """The targets that go with inputs of that name: ``y_train`` with ``X_train``."""
    wanted = re.sub(r"(?<![a-zA-Z])[xX](?=_|[A-Z]|$|tr|va|te)|[xX]$|inputs?|feats?|features?", "#", name).lower()
    for other, value in holdings.items():
        vector = numbers_of(value)
        shape = re.sub(r"(?<![a-zA-Z])[yY](?=_|[A-Z]|$|tr|va|te)|[yY]$|labels?|targets?", "#", other).lower()
        if shape == wanted and other != name and vector is not None and len(vector) == count:
            return target_of(vector)
    return None


def find_order(train: Rows, other: Rows, holdings: dict[str, Any]) -> None:
    """Places of both sides' rows in a table of the user's that holds them all; and the vectors that are as long as it."""
    left, right = row_keys(train.x), row_keys(other.x)
    if len(np.unique(left)) < 0.9 * len(left):
        return
    width = train.x.shape[1:]
    names = column_names(holdings, train)
    for value in holdings.values():
        frame = value if type(value).__name__ == "DataFrame" else None
        chosen = frame[names] if frame is not None and names and set(names) <= set(frame.columns) else value
        whole = numbers_of(chosen)
        if whole is None or whole.ndim < 2 or whole.shape[1:] != width or len(whole) < len(left) or whole.size > 1 << 23:
            continue
        keys = row_keys(flat(whole))
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        places = []
        for own in (left, right):
            at = np.minimum(np.searchsorted(sorted_keys, own), len(keys) - 1)
            places.append(np.where(sorted_keys[at] == own, order[at], -1))
        if all((p >= 0).mean() > 0.95 for p in places):
            train.order, other.order = places
            columns = {str(c): frame[c] for c in list(frame.columns)[:60]} if frame is not None else {}
            add_vectors(train, other, len(keys), {**columns, **holdings})
            return


def column_names(holdings: dict[str, Any], train: Rows) -> list[str]:
    width = int(np.prod(train.x.shape[1:]))
    for value in holdings.values():
        if isinstance(value, list) and len(value) == width and all(isinstance(v, str) for v in value):
            return list(value)
    return []
