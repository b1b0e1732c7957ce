"""Questions to two sets of rows: equal ones, shifted windows, twins, neighbours in the original order, groups. Plain numpy; every answer is a dict of figures or ``None`` where the question makes no sense."""

from __future__ import annotations

from typing import Any

import numpy as np

from osler.watch.experiments.column_questions import one_to_one

Array = np.ndarray[Any, Any]
SAMPLE = 400


def keys(x: Array) -> Array:
    """64-bit hash of each row [rows, ...]."""
    flat = np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float32) + np.float32(0.0)
    bits = flat.view(np.uint32).astype(np.uint64)
    odd = np.random.Generator(np.random.PCG64(7)).integers(1, 1 << 63, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = bits * odd
        mixed ^= mixed >> np.uint64(29)
        found: Array = (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(1, dtype=np.uint64)
    return found


def overlap(train: Array, other: Array) -> dict[str, Any]:
    """``share`` of the judged rows that are training rows; ``chance``: how often training rows equal each other, scaled;
    ``measured``: columns (of the first 24) in which hardly two different rows agree, so that equal rows are copies."""
    left, right = keys(train), keys(other)
    half = left[::2]
    chance = min(1.0, float(np.isin(left[1::2], half).mean()) * len(left) / max(len(half), 1))
    hit = np.isin(right, left)
    rows = train[np.unique(left[:2000], return_index=True)[1]].reshape(-1, int(np.prod(train.shape[1:])))[:, :24]
    measured = sum(len(np.unique(column)) >= max(0.8 * len(rows), 20) for column in rows.T)
    return {"share": _r(hit.mean()), "hits": int(hit.sum()), "chance": _r(chance), "values": len(np.unique(train[:200])), "measured": measured}


def shifted(train: Array, other: Array) -> dict[str, Any] | None:
    """``share`` of the judged rows that are a training row moved by some steps: the beginning of one stands inside the other."""
    best: dict[str, Any] | None = None
    layouts = [(train, other)]
    if train.ndim == 3:
        layouts.append((train.swapaxes(1, 2), other.swapaxes(1, 2)))
    for a, b in layouts:
        a, b = a[:4000].reshape(min(len(a), 4000), -1), b[:SAMPLE].reshape(min(len(b), SAMPLE), -1)
        width = a.shape[1]
        if width < 8 or width > 2048:
            continue
        block = int(np.clip(width // 3, 5, 24))
        whole = bool((a[:50] == np.round(a[:50])).all())
        if whole:
            block = min(max(block, 16), width - 1)
        found = np.zeros(len(b), bool)
        heads_a, heads_b = _heads(a, block, whole), _heads(b, block, whole)
        steps: list[int] = []
        tails: set[int] = set()
        for p in range(1, width - block + 1):
            hit = np.isin(keys(b[:, p:p + block]), heads_a)
            if hit.any():
                found |= hit
                steps += [p] * int(hit.sum())
            # and the other way round: a judged row begins inside a training row
            inside = keys(a[:: max(1, len(a) // 1500), p:p + block])
            tails |= set(inside[np.isin(inside, heads_b)].tolist())
        if tails:
            found |= np.isin(keys(b[:, :block]), np.array(sorted(tails), np.uint64)) & _busy(b[:, :block], whole)
        row = {"share": _r(found.mean()), "shift": int(np.median(steps)) if steps else None, "block": block, "rows": len(b), "whole": whole}
        if best is None or row["share"] > best["share"]:
            best = row
    return best


def _busy(block: Array, whole: bool) -> Array:
    """Blocks with enough different values that meeting by chance is out of the question."""
    ordered = np.sort(block, axis=1)
    distinct = 1 + (np.diff(ordered, axis=1) != 0).sum(1)
    found: Array = distinct >= (6 if whole else min(5, block.shape[1]))
    return found


def _heads(x: Array, block: int, whole: bool) -> Array:
    head = x[:, :block]
    return keys(head[_busy(head, whole)]) if len(head) else np.zeros(0, np.uint64)


def _scaled(train: Array, other: Array) -> tuple[Array, Array]:
    a, b = train.reshape(len(train), -1).astype(np.float64), other.reshape(len(other), -1).astype(np.float64)
    if a.shape[1] > 256:
        chosen = np.linspace(0, a.shape[1] - 1, 256).astype(int)
        a, b = a[:, chosen], b[:, chosen]
    mean, std = a.mean(0), a.std(0)
    use = std > 1e-12
    return (a[:, use] - mean[use]) / std[use], (b[:, use] - mean[use]) / std[use]


def _distances(b: Array, a: Array) -> Array:
    square = (b * b).sum(1)[:, None] + (a * a).sum(1)[None] - 2 * b @ a.T
    found: Array = np.sqrt(np.maximum(square, 0))
    return found


def scales(train: Array, other: Array) -> dict[str, Any] | None:
    """How the columns of the other side lie on the scale of training: medians over the columns that vary of the ratio of
    deviations and of the distance of means in training deviations."""
    a, b = (x.reshape(len(x), -1)[:, :512].astype(np.float64) for x in (train, other))
    spread = a.std(0)
    busy = (spread > 1e-9) & (b.std(0) > 1e-12)
    if busy.sum() < 2 or len(b) < 20:
        return None
    return {"ratio": _r(np.median(b.std(0)[busy] / spread[busy])), "shift": _r(np.median(np.abs(b.mean(0) - a.mean(0))[busy] / spread[busy])), "columns": int(busy.sum()), "rows": len(b)}


def twins(train: Array, other: Array, y_train: Array | None, y_other: Array | None) -> dict[str, Any] | None:
    """Tight clusters with members on both sides: for each judged row the ordered distances to the training rows have a jump.

    ``share``: judged rows whose nearest k training rows (k up to 60) lie far nearer than the next ones; ``size``: median k; ``jump``:
    median ratio; ``clusters``: training rows over k; ``agree``: share of judged rows whose nearest row has the same target; ``base``: agreement of random ones.
    """
    a, b = _scaled(train[:6000], other)
    if a.shape[1] < 4 or len(a) < 40:
        return None
    rng = np.random.default_rng(3)
    pick = rng.permutation(len(b))[:SAMPLE]
    d = _distances(b[pick], a)
    nearest = d.argmin(1)
    reach = min(61, len(a) // 4)
    low = np.sort(np.partition(d, reach, axis=1)[:, :reach], axis=1)
    typical = float(np.median(d))
    floor = 1e-9 + 1e-4 * typical
    ratio = (low[:, 1:] + floor) / (low[:, :-1] + floor)
    k = ratio.argmax(1)
    jump = ratio.max(1)
    inner = low[np.arange(len(low)), k]
    need = np.where(k == 0, 2.5, 1.5)
    tight = (jump > need) & (inner < 0.6 * typical)
    row: dict[str, Any] = {"share": _r(tight.mean()), "rows": len(pick), "size": int(np.median(k[tight]) + 1) if tight.any() else 0, "jump": _r(np.median(jump[tight])) if tight.any() else None,
                           "inner": _r(np.median(low[:, 0]) / max(typical, 1e-12)), "columns": int(a.shape[1]), "agree": None, "base": None}
    row["clusters"] = int(len(a) / max(row["size"], 1))
    row["cells"] = _cells(a, float(np.median(inner[tight])) * 1.1) if tight.sum() > 10 else None
    if y_train is not None and y_other is not None and y_train.ndim == 1 and y_other.ndim == 1 and len(y_train) >= len(a) and len(y_other) == len(b):
        own = y_other[pick]
        row["classes"] = len(np.unique(y_train))
        row["agree"] = _r((y_train[nearest] == own).mean())
        row["base"] = _r((y_train[rng.integers(0, len(a), len(own))] == own).mean())
    return row


def _cells(a: Array, radius: float) -> int:
    """Number of clusters of training rows: greedy cover with balls of that radius (a sample of 1500)."""
    a = a[np.random.default_rng(5).permutation(len(a))[:1500]]
    free, count = np.ones(len(a), bool), 0
    while free.any() and count < 400:
        first = int(np.argmax(free))
        near = np.sqrt(np.maximum(((a - a[first]) ** 2).sum(1), 0)) <= radius
        near[first] = True
        free &= ~near
        count += 1
    return count


def neighbours(train: Any, other: Any) -> dict[str, Any] | None:
    """In the original order: do rows next to each other look alike, and are they on different sides?

    ``alike``: median distance of rows that are next to each other, over that of random pairs; ``lags``: the same at 2, 5 and 20 places;
    ``between``: share of the judged rows with training rows on both sides within 2 places; ``ahead``: share of the judged rows before all training rows.
    """
    if train.order is None or other.order is None:
        return None
    a, b = _scaled(train.x, other.x)
    x = np.concatenate([a, b])
    place = np.concatenate([train.order, other.order])
    side = np.concatenate([np.zeros(len(a), bool), np.ones(len(b), bool)])
    good = place >= 0
    x, place, side = x[good], place[good], side[good]
    order = np.argsort(place, kind="stable")
    x, place, side = x[order], place[order], side[order]
    if len(x) < 40 or x.shape[1] == 0:
        return None
    rng = np.random.default_rng(4)
    i, j = rng.integers(0, len(x), 3000), rng.integers(0, len(x), 3000)
    usual = float(np.median(np.linalg.norm(x[i] - x[j], axis=1)))
    if usual <= 0:
        return None
    lags = {}
    for lag in (1, 2, 5, 20):
        if lag < len(x) // 2:
            at = rng.integers(0, len(x) - lag, 3000)
            lags[str(lag)] = _r(float(np.median(np.linalg.norm(x[at] - x[at + lag], axis=1))) / usual)
    own = np.flatnonzero(side)
    free = ~side
    before = np.array([free[max(0, i - 2):i].any() for i in own])
    after = np.array([free[i + 1:i + 3].any() for i in own])
    monotone = _share_monotone(x)
    return {"alike": lags.get("1"), "lags": lags, "between": _r((before & after).mean()), "rows": len(own), "monotone": monotone,
            "ahead": _r((place[own] < place[free].min()).mean()) if free.any() else None}


def _share_monotone(x: Array) -> float:
    """Largest correlation of a column with the place: 1 for a grid or a sorted column."""
    place = np.arange(len(x), dtype=float)
    place = (place - place.mean()) / place.std()
    std = x.std(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        c = np.abs(((x - x.mean(0)) * place[:, None]).mean(0) / std)
    return _r(np.nanmax(np.where(std > 0, c, 0))) if x.shape[1] else 0.0


def group(name: str, train: Any, other: Any) -> dict[str, Any] | None:
    """A vector that may name entities: how many there are, how many are on both sides, whether a target or a column repeats it."""
    a, b = train.vectors[name], other.vectors[name]
    if a.dtype.kind == "b" or len(a) != len(train.x) or len(b) != len(other.x):
        return None
    ids, counts = np.unique(np.concatenate([a, b]), return_counts=True)
    if not 2 <= len(ids) <= 0.6 * (len(a) + len(b)) or np.median(counts) < 2:
        return None
    row: dict[str, Any] = {"name": name, "groups": len(ids), "size": int(np.median(counts)), "both": _r(np.isin(b, a).mean()), "judged_groups": len(np.unique(b))}
    y = train.y
    row["is_target"] = bool(y is not None and y.ndim == 1 and len(y) == len(a) and one_to_one(a, y))
    row["pure"] = row["pure_base"] = None
    if y is not None and y.ndim == 1 and len(y) == len(a) and len(np.unique(y)) <= 50:
        row["pure"], row["pure_base"] = _r(_purity(a, y)), _r(_purity(np.random.default_rng(6).permutation(a), y))
        row["classes"] = len(np.unique(y))
    flat = train.x.reshape(len(train.x), -1)
    row["is_column"] = bool(flat.shape[1] <= 64 and any((flat[:, c] == a).all() or one_to_one(a, flat[:, c]) for c in range(flat.shape[1])))
    x, _ = _scaled(train.x, train.x[:1])
    if x.shape[1]:
        rng = np.random.default_rng(8)
        order = np.argsort(a, kind="stable")
        same = np.flatnonzero(a[order][1:] == a[order][:-1])
        if len(same) > 20:
            pick = same[rng.integers(0, len(same), 1500)]
            within = np.linalg.norm(x[order[pick]] - x[order[pick + 1]], axis=1)
            i, j = rng.integers(0, len(x), 1500), rng.integers(0, len(x), 1500)
            row["alike"] = _r(float(np.median(within)) / max(float(np.median(np.linalg.norm(x[i] - x[j], axis=1))), 1e-12))
    return row


def _purity(groups: Array, y: Array) -> float:
    order = np.argsort(groups, kind="stable")
    g, t = groups[order], y[order]
    cuts = np.flatnonzero(np.diff(g)) + 1
    total = 0
    for part in np.split(t, cuts):
        total += int(np.unique(part, return_counts=True)[1].max())
    return total / len(y)


def _r(value: Any, digits: int = 4) -> float:
    return round(float(value), digits)
