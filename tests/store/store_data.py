"""Rows that carry their own proof: every value follows from the step, so a wrong row shows itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.signals import LAYERS, STEPS, STREAMS
from osler.store.writer import Writer


def step_values(step: int) -> tuple[float, ...]:
    return (step, step * 0.5, step % 3, step % 7, step * 0.25, 1.0, step * 0.125, 2.0, step % 11, 4.0)


def wrong_steps(rows: np.ndarray, first: int = 1) -> int:
    """How many rows are not exactly what ``step_values`` gives for consecutive steps."""
    expected = np.array([step_values(s) for s in range(first, first + len(rows))], STEPS.dtype)
    return int((rows != expected).sum())


def layer_rows(step: int, n: int = 8) -> np.ndarray:
    rows = np.zeros(n, LAYERS.dtype)
    rows["step"], rows["param"], rows["grad_norm"] = step, np.arange(n), step + np.arange(n)
    return rows


def make_run(directory: Path, **info: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps({"schema": 1, **info}))
    return directory


def write_run(directory: Path, steps: int = 300, rank: int = 0, **options: float) -> Path:
    """A whole run with some of everything."""
    make_run(directory)
    writer = Writer(directory, rank=rank, **options)  # type: ignore[arg-type]
    writer.open()
    writer.source("/home/me/train.py", "import torch\nloss.backward()\n")
    for step in range(1, steps + 1):
        if step % 10 == 1:
            writer.fact(Fact("mark", step, step * 0.5, Location("train.py", step, "main"), {"n": step}))
        writer.row("steps", step_values(step))
        writer.row("calls", (step - 1, step * 0.5, 0, 0, 32, step * 0.25, 0.5))
        writer.rows("layers", layer_rows(step))
    writer.trace({"index": 0, "why": "test", "first_step": 0, "last_step": 1, "files": ["train.py"],
                  "tensors": [[[2, 2], "float32", 1, 0, -1]], "ops": [{"op": "relu", "at": [0, 1, "f"], "in": [0], "out": [0]}]})
    assert writer.flush(10)
    writer.close()
    assert writer.error is None and writer.lost == 0
    (directory / "end.json").write_text(json.dumps({"code": 0, "seconds": 1.5}))
    return directory


def all_streams() -> list[str]:
    return list(STREAMS)
