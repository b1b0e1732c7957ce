"""What all benchmarks share: the machine in words, results as JSON, tables on the terminal, bootstrap intervals.

Run as ``python bench/NAME/run.py``; each benchmark adds this folder to ``sys.path`` itself, so that nothing has to be installed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, memory, load, and versions: enough to tell two results apart."""
    cpu, memory = platform.processor(), None
    try:
        cpu = next(line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                   if line.startswith("model name"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, StopIteration, ValueError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", "osler", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"system": platform.platform(), "cpu": cpu, "cores": cores, "memory_gib": memory and round(memory, 1),
            "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None, "versions": versions}


def commit() -> str | None:
    """Short hash of the tree that was measured, with ``+`` when it had changes."""
    try:
        short = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return short.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def shown_command() -> str:
    """The command line as somebody else would type it: no machine's paths in it."""
    words = [os.path.relpath(w, ROOT) if os.path.isabs(w) and Path(w).exists() else w for w in sys.argv]
    return " ".join(["python", *words])


def write(path: Path, summary: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """One result file: ``summary`` first (what a reader or a gate looks at), then how it came about, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"summary": summary, "command": shown_command(), "commit": commit(), "machine": machine(), **more,
                "rows": list(rows)}
    path.write_text(json.dumps(document, indent=1, default=_plain) + "\n")
    console.print(f"wrote {path}")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not JSON: {type(value).__name__}")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Prints a table; ``right`` names the columns that hold numbers."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        shown.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[cell(value) for value in row])
    console.print(shown)
    console.print()


def cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def bootstrap_median(values: Sequence[float], level: float = 0.95, repeats: int = 4000, seed: int = 0) -> tuple[float, float, float]:
    """Median of ``values`` with a percentile bootstrap interval.

    Returns:
        median, low, high; three NaN without values, and low = high = median with one.
    """
    x = np.asarray([v for v in values if np.isfinite(v)], float)
    if not len(x):
        return (float("nan"),) * 3
    rng = np.random.default_rng(seed)
    medians = np.median(x[rng.integers(0, len(x), (repeats, len(x)))], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(x)), float(low), float(high)
