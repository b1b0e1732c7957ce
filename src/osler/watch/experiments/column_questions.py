"""Questions to inputs and targets of one set of rows: does a single column, or a place in the window, give the target away? Plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def one_to_one(a: Array, b: Array) -> bool:
    pairs = len(np.unique(np.stack([a.astype(np.float64), b.astype(np.float64)]), axis=1).T)
    return pairs == len(np.unique(a)) == len(np.unique(b))


def deciding_column(x: Array, y: Array | None, names: list[str]) -> dict[str, Any] | None:
    """The column that says most about the target, and the next best. ``kind``: copy (affine), monotone, code (one value a class),
    threshold (a cut separates two classes), or strong."""
    if y is None or y.ndim != 1 or len(y) != len(x) or len(y) < 40 or y.dtype.kind not in "fiub":
        return None
    flat = x.reshape(len(x), -1).astype(np.float64)
    flat, y = flat[:4000], y[:4000].astype(np.float64)
    keep = np.isfinite(y)
    flat, y = flat[keep], y[keep]
    classes = np.unique(y)
    if flat.shape[1] < 2 or flat.shape[1] > MAX or len(classes) < 2:
        return None
    discrete = len(classes) <= 20
    scores = _auc(flat, y == classes[1]) if len(classes) == 2 else _ratio(flat, y, classes) if discrete else np.abs(_pearson(flat, y))
    order = np.argsort(-scores)
    top, second = int(order[0]), int(order[1])
    column = flat[:, top]
    kind = "strong"
    if discrete and len(np.unique(column)) <= len(classes) and one_to_one(column, y):
        kind = "code"
    elif not discrete and scores[top] > 1 - 1e-6:
        kind = "copy"
    elif len(classes) == 2 and scores[top] > 0.99999:
        kind = "threshold"
    elif len(classes) == 2 and _spike(column, y, classes):
        kind = "present"
    elif not discrete:
        ranks = np.abs(_pearson(_rank(flat[:, order[:8]]), _rank(y[:, None])[:, 0]))
        if ranks.max() > 0.99999:
            top, kind = int(order[int(ranks.argmax())]), "monotone"
    joint = _joint(flat, y, top, discrete)
    return {"index": top, "label": names[top] if len(names) == flat.shape[1] else None, "kind": kind, "score": _r(scores[top], 6), "second": _r(scores[second], 6),
            "columns": int(flat.shape[1]), "rows": len(y), "classes": len(classes) if discrete else None,
            "without": joint, "measure": "area under the curve" if len(classes) == 2 else "correlation ratio" if discrete else "correlation"}


MAX = 2000


def _spike(column: Array, y: Array, classes: Array) -> bool:
    """One value (no entry, say) stands for one class and only other values for the other."""
    values, counts = np.unique(column, return_counts=True)
    return bool(((column == values[counts.argmax()]) == (y == classes[0])).mean() in (0.0, 1.0))


def _joint(x: Array, y: Array, without: int, discrete: bool) -> float | None:
    """How well a linear fit on half of the rows does on the other half without that column: R² or share of right classes."""
    rest = np.delete(x, without, axis=1)[:, :60]
    mean, std = rest.mean(0), rest.std(0)
    rest = np.concatenate([(rest - mean) / np.where(std > 0, std, 1), np.ones((len(rest), 1))], 1)
    half = np.random.default_rng(9).permutation(len(y))
    a, b = half[::2], half[1::2]
    goal = (y[:, None] == np.unique(y)[None]).astype(float) if discrete else y[:, None]
    try:
        w = np.linalg.solve(rest[a].T @ rest[a] + 1e-3 * len(a) * np.eye(rest.shape[1]), rest[a].T @ goal[a])
    except np.linalg.LinAlgError:
        return None
    out = rest[b] @ w
    if discrete:
        return _r((out.argmax(1) == goal[b].argmax(1)).mean())
    return _r(1 - ((out - goal[b]) ** 2).mean() / max(float(goal[b].var()), 1e-30))


def _pearson(x: Array, y: Array) -> Array:
    a, b = x - x.mean(0), y - y.mean()
    std = a.std(0) * b.std()
    found: Array = np.where(std > 1e-12, (a * b[:, None]).mean(0) / np.where(std > 1e-12, std, 1), 0.0)
    return found


def _rank(x: Array) -> Array:
    found: Array = np.argsort(np.argsort(x, axis=0, kind="stable"), axis=0, kind="stable").astype(float)
    return found


def _auc(x: Array, positive: Array) -> Array:
    """Area under the curve of each column alone, ties counted half, whichever direction."""
    n = int(positive.sum())
    out = np.zeros(x.shape[1])
    for c in range(x.shape[1]):
        _, inverse, counts = np.unique(x[:, c], return_inverse=True, return_counts=True)
        rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
        area = (rank[positive].sum() - n * (n + 1) / 2) / max(n * (len(positive) - n), 1)
        out[c] = max(area, 1 - area)
    return out


def _ratio(x: Array, y: Array, classes: Array) -> Array:
    """Share of a column's variance that lies between the classes."""
    total = x.var(0)
    between = sum((y == c).mean() * (x[y == c].mean(0) - x.mean(0)) ** 2 for c in classes)
    found: Array = np.where(total > 1e-12, between / np.where(total > 1e-12, total, 1), 0.0)
    return found


def target_within(x: Array, y: Array | None) -> dict[str, Any] | None:
    """Real-valued targets that stand in the input itself, number for number (up to scale): the window reaches into its own future.

    ``found``: how many of the ``targets`` numbers of a row do; ``places``: where in the flattened input of ``columns`` numbers.
    """
    if y is None or len(y) != len(x) or len(x) < 40:
        return None
    if x.ndim == 3 and y.ndim >= 2 and x.shape[1] == y.shape[1]:  # a target at each step: what came before may be in the input
        return _step_channel(x, y[..., 0] if y.ndim == 3 and y.shape[2] == 1 else y)
    if y.dtype.kind != "f":
        return None
    goals = y.reshape(len(y), -1)[:2000].astype(np.float64)
    flat = x.reshape(len(x), -1)[:2000].astype(np.float64)
    if flat.shape[1] < 3 or flat.shape[1] > MAX or goals.shape[1] > 0.5 * flat.shape[1] or goals.shape[1] > 200:
        return None
    places = []
    for g in range(goals.shape[1]):
        if len(np.unique(goals[:, g])) > 20:
            c = np.abs(_pearson(flat, goals[:, g]))
            if c.max() > 1 - 1e-8:
                places.append(int(c.argmax()))
    return {"found": len(places), "targets": int(goals.shape[1]), "places": places[:20], "columns": int(flat.shape[1]), "axes": list(x.shape[1:])} if places else None


def _r(value: Any, digits: int = 4) -> float:
    return round(float(value), digits)


def _step_channel(x: Array, y: Array) -> dict[str, Any] | None:
    """Targets at each step [rows, steps] that a channel of the input [rows, steps, channels >= 2] repeats at the same step."""
    if x.ndim != 3 or y.ndim != 2 or x.shape[1] != y.shape[1] or not 2 <= x.shape[2] <= 200 or y.shape[1] < 4:
        return None
    goal = y[:500].reshape(-1).astype(np.float64)
    part = x[:500].reshape(len(goal), -1).astype(np.float64)
    if len(np.unique(goal)) < 2:
        return None
    scores = np.abs(_pearson(part, goal))
    best = int(scores.argmax())
    second = float(np.delete(scores, best).max())
    if scores[best] < 0.999 or second > 0.95:
        return None
    return {"found": int(y.shape[1]), "targets": int(y.shape[1]), "places": [best], "columns": int(x.shape[2]), "axes": list(x.shape[1:]), "each_step": True}
