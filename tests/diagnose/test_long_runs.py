"""A run of many steps costs the engine little memory: no rule may make a table of every step against many others."""

from __future__ import annotations

import tracemalloc

import numpy as np

from osler.core.signals import STREAMS
from osler.core.window import End, Window
from osler.diagnose import engine


def test_memory_of_a_long_curve() -> None:
    n = 200_000
    rng = np.random.default_rng(0)
    steps = np.zeros(n, STREAMS["steps"].dtype)
    steps["step"], steps["t"] = np.arange(1, n + 1), np.arange(n) * 1e-3
    steps["loss"] = 2.0 * np.exp(-np.arange(n) / 50_000) * (1 + 0.4 * np.sin(np.arange(n) / 300)) * rng.lognormal(0, 0.1, n)
    steps["loss"][rng.integers(0, n, 40)] *= 30
    steps["backwards"], steps["lr"], steps["grad_norm"], steps["step_time"] = 1, 0.01, 1.0, 1e-3
    window = Window(streams={"steps": steps}, end=End(0))
    tracemalloc.start()
    engine.diagnose(window)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert peak < 200, f"{peak:.0f} MiB for {steps.nbytes / 2**20:.0f} MiB of rows"
