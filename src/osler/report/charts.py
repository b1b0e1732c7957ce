"""Charts as HTML with inline SVG: curves with their min/max band, bars over layers, a value against its threshold.

Only shapes are drawn in SVG, stretched to whatever width there is; labels are HTML, so they stay readable at 390 pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from osler.report import words

STYLE = {"train_loss": ("--train", ""), "validation_loss": ("--validation", "dashed"), "train_accuracy": ("--train", ""),
         "validation_accuracy": ("--validation", "dashed"), "data_wait": ("--validation", "dashed")}
SIZE = 1000
DEEPEST = 1e-8
"""Share of the largest value below which a logarithmic axis does not go."""
GAP = 6
"""A hole in a curve is this many times its usual distance between points."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps a value to a share of the height, from the bottom."""

    low: float
    high: float
    log: bool

    def __call__(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log10(max(v, self.low)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self) -> list[float]:
        if not self.log:
            return nice(self.low, self.high)
        low, high = math.log10(self.low), math.log10(self.high)
        every = max(1, math.ceil((high - low) / 5))
        marks = [10.0 ** e for e in range(math.ceil(low), math.floor(high) + 1) if e % every == 0]
        if len(marks) >= 2:
            return marks
        fine = [m * 10.0 ** e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
        return [v for v in fine if self.low <= v <= self.high] or nice(self.low, self.high)


def nice(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers between two bounds."""
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def scale(curves: Sequence[dict[str, Any]], threshold: float | None) -> Scale:
    """Holds every extreme of every curve; logarithmic where none is negative (zeros lie on the bottom line)."""
    values = [v for c in curves for key in ("min", "max") for v in c[key]] + ([threshold] if threshold is not None else [])
    positive = [v for v in values if v > 0]
    log = all(c["log"] for c in curves) and len(positive) > 0.5 * len(values) and all(v >= 0 for v in values)
    low, high = (max(min(positive), max(positive) * DEEPEST), max(positive)) if log else (min(values), max(values))
    if log:
        return Scale(low / 1.15, high * 1.15, True) if high / low > 1.02 else Scale(low / 2, high * 2, True)
    room = 0.06 * (high - low) or abs(high) * 0.5 or 1.0
    return Scale(low - room if low < 0 or low > room else 0.0, high + room, False)


def curve(series: dict[str, Any], names: Sequence[str], *, title: str, span: Sequence[int | None] = (None, None), threshold: float | None = None,
          height: str = "9rem") -> str:
    """One plot of some series over steps, with the steps of a finding shaded and its threshold drawn."""
    curves = [series[n] for n in names]
    first, last = reach(curves)
    width = max(1, last - first)
    rise = scale(curves, threshold)
    shapes = [f'<line class="grid" x1="0" x2="{SIZE}" y1="{down(rise(t))}" y2="{down(rise(t))}"/>' for t in rise.ticks()]
    if span[0] is not None and (span[0] > first or (span[1] or last) < last):
        left, right = (SIZE * (min(max(s, first), last) - first) / width for s in (span[0], span[1] if span[1] is not None else last))
        shapes.append(f'<rect class="span" x="{left:.1f}" y="0" width="{max(right - left, 3):.1f}" height="{SIZE}"/>')
    for name, c in zip(names, curves, strict=True):
        shapes.append(path(name, c, first, width, rise))
    if threshold is not None:
        shapes.append(f'<line class="limit" x1="0" x2="{SIZE}" y1="{down(rise(threshold))}" y2="{down(rise(threshold))}"/>')
    labels = [f'<span class="y" style="top:{down(rise(t)) / 10:.1f}%">{words.figure(t)}</span>' for t in rise.ticks()]
    labels += x_labels(first, last)
    if threshold is not None:
        labels.append(f'<span class="tag" style="top:{down(rise(threshold)) / 10:.1f}%">threshold {words.figure(threshold)}</span>')
    lost = min((c["nonfinite"]["first_step"] for c in curves if c["nonfinite"]["count"]), default=None)
    if lost is not None:
        x = (lost - first) / width
        good = next(c["nonfinite"] for c in curves if c["nonfinite"]["count"] and c["nonfinite"]["first_step"] == lost)
        if good.get("for_good", True):
            shapes.append(f'<rect class="span" x="{SIZE * x:.1f}" y="0" width="{SIZE * (1 - x):.1f}" height="{SIZE}"/>')
        shapes.append(f'<line class="lost" x1="{SIZE * x:.1f}" x2="{SIZE * x:.1f}" y1="0" y2="{SIZE}"/>')
        labels.append(f'<span class="tag at{" left" if x > .5 else ""}" style="left:{100 * x:.1f}%">{words.lost(good)}</span>')
    told = "; ".join(f"{c['label']} from {words.figure(c['first'])} to {words.figure(c['last'])}, "
                     f"between {words.figure(min(c['min']))} and {words.figure(max(c['max']))}" for c in curves)
    label = f"{title}: {told}. Steps {first} to {last}. Arrow keys read values."
    return (f'<figure class="chart"><figcaption><span>{keys(names, curves)}</span><output></output></figcaption>'
            f'<div class="plot" style="--h:{height}" tabindex="0" role="img" aria-label="{escape(label)}" data-series="{" ".join(names)}" '
            f'data-first="{first}" data-last="{last}"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
            f'{"".join(shapes)}</svg>{"".join(labels)}<span class="cursor"></span></div></figure>')


def reach(curves: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """First and last step, those whose value was not finite included."""
    steps = [s for c in curves for s in (c["x"][0], c["end"][-1], c["nonfinite"]["first_step"], c["nonfinite"]["last_step"]) if s is not None]
    return min(steps), max(steps)


def keys(names: Sequence[str], curves: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name, c in zip(names, curves, strict=True):
        color, dash = STYLE.get(name, ("--train", ""))
        rows.append(f'<span class="key {dash}" style="--c:var({color})">{escape(c["label"])}</span>')
    if any(any(gaps(c)) for c in curves):
        rows.append('<span class="key dotted" style="--c:var(--soft)">not measured</span>')
    return "".join(rows)


def down(share: float) -> float:
    return round(SIZE * (1 - share), 1)


def path(name: str, c: dict[str, Any], first: int, width: int, rise: Scale) -> str:
    """The band of extremes and the line of means; where nothing was measured for long, only a faint bridge."""
    color, dash = STYLE.get(name, ("--train", ""))
    xs = [round(SIZE * ((a + b) / 2 - first) / width, 1) for a, b in zip(c["x"], c["end"], strict=True)]
    points = {key: [f"{x},{down(rise(y))}" for x, y in zip(xs, c[key], strict=True)] for key in ("min", "mean", "max")}
    holes = [i for i, gap in enumerate(gaps(c), 1) if gap]
    cuts = [slice(a, b) for a, b in itertools.pairwise([0, *holes, len(xs)])]
    bands = "".join(f"M{'L'.join([*points['max'][cut], *reversed(points['min'][cut])])}Z" for cut in cuts) if c["min"] != c["max"] else ""
    lines = "".join(f"M{'L'.join(points['mean'][cut])}" + ("h0.1" if cut.stop - cut.start == 1 else "") for cut in cuts)
    bridges = "".join(f"M{points['mean'][i - 1]}L{points['mean'][i]}" for i in holes)
    shapes = (("band", bands), ("bridge", bridges), (f"curve {dash}".strip(), lines))
    return "".join(f'<path class="{kind}" style="--c:var({color})" d="{d}"/>' for kind, d in shapes if d)


def gaps(c: dict[str, Any]) -> list[bool]:
    """For each pair of neighbouring buckets, whether steps between them went unmeasured."""
    distances = [b - a for a, b in zip(c["end"], c["x"][1:], strict=False)]
    usual = sorted(distances)[len(distances) // 2] if distances else 0
    return [d > GAP * max(1, usual) for d in distances]


def x_labels(first: int, last: int) -> list[str]:
    width = max(1, last - first)
    inner = [t for t in nice(first, last, 4) if 0.08 < (t - first) / width < 0.86 and float(t).is_integer()]
    rows = [f'<span class="x start" style="left:0">{first}</span>']
    rows += [f'<span class="x" style="left:{100 * (t - first) / width:.1f}%">{int(t)}</span>' for t in inner]
    return [*rows, f'<span class="x end" style="left:100%">step {last}</span>'] if last > first else rows


def bars(spec: dict[str, Any]) -> str:
    """One bar per parameter; the accused one in colour."""
    values = [b["value"] for b in spec["bars"]]
    threshold = spec.get("threshold")
    known = values + ([threshold] if threshold is not None else [])
    size = sizes(known, spec["log"])
    limit = f'<i class="limit-at" style="left:{100 * size(threshold):.1f}%"></i>' if threshold is not None else ""
    rows = "".join(
        f'<span class="name" title="{escape(b["name"])}"><bdi>{escape(b["name"])}</bdi></span>'
        f'<span class="track"><span class="fill{" mark" if b["mark"] else ""}" style="width:{100 * size(b["value"]):.1f}%"></span>{limit}</span>'
        f'<span class="v">{words.figure(b["value"])}</span>' for b in spec["bars"])
    note = f"{escape(spec['signal'].split('/')[-1].replace('_', ' '))}, median per parameter{', log scale' if spec['log'] else ''}"
    if threshold is not None:
        note += f", threshold {words.figure(threshold)}"
    return f'<figure class="chart"><figcaption>{note}</figcaption><div class="bars">{rows}</div></figure>'


def sizes(values: Sequence[float], log: bool) -> Any:
    """Value to bar length between 0 and 1."""
    positive = [v for v in values if v > 0]
    top = max((abs(v) for v in values), default=1.0) or 1.0
    if log and positive:
        low = math.log10(min(positive)) - 0.3
        return lambda v: max(0.0, (math.log10(v) - low) / (math.log10(top) - low)) if v > 0 else 0.0
    return lambda v: abs(v) / top


def gauge(spec: dict[str, Any]) -> str:
    value, threshold = spec["value"], spec["threshold"]
    far = value > 0 and threshold > 0 and max(value, threshold) / min(value, threshold) > 30
    size = sizes([value, threshold], far)
    return (f'<figure class="chart"><div class="bars"><span>measured</span><span class="track"><span class="fill mark" '
            f'style="width:{100 * size(value):.1f}%"></span><i class="limit-at" style="left:{100 * size(threshold):.1f}%"></i></span>'
            f'<span class="v">{words.figure(value)}</span><span>threshold</span><span></span><span class="v">{words.figure(threshold)}</span></div></figure>')


def of(finding: dict[str, Any], series: dict[str, Any]) -> str:
    """The chart that a finding asks for."""
    spec = finding["chart"]
    if spec is None:
        return ""
    if spec["kind"] == "curve":
        return curve(series, spec["series"], title=finding["cause"], span=spec["span"], threshold=spec["threshold"])
    return bars(spec) if spec["kind"] == "bars" else gauge(spec)
