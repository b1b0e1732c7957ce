"""Bands equal brute force, and no extreme is ever sampled away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_data import make_run

from osler.core.errors import UsageError
from osler.core.signals import STEPS
from osler.store.pyramid import BAND, FACTOR, Pyramid
from osler.store.reader import RunReader
from osler.store.writer import Writer


def rows_of(losses: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(losses), STEPS.dtype)
    rows["step"], rows["loss"], rows["lr"] = np.arange(1, len(losses) + 1), losses, 0.1
    return rows


def check_band(band: np.void, rows: np.ndarray, prefix: str = "") -> None:
    """Compare one band with the rows it covers, computed the slow way."""
    values = rows["loss"].astype(np.float64)
    finite = values[np.isfinite(values)]
    assert (band["first_step"], band["last_step"], band["count"]) == (rows["step"][0], rows["step"][-1], len(rows))
    assert band[prefix + "nan"] == np.isnan(values).sum() and band[prefix + "inf"] == np.isinf(values).sum()
    if len(finite):
        assert band[prefix + "min"] == finite.min() and band[prefix + "max"] == finite.max()
        assert abs(band[prefix + "mean"] - finite.mean()) <= 1e-5 * np.abs(finite).max()
    else:
        assert all(np.isnan(band[prefix + part]) for part in ("min", "max", "mean"))


values = st.one_of(st.floats(width=32, min_value=-2.0**100, max_value=2.0**100), st.sampled_from([np.nan, np.inf, -np.inf]))


@settings(max_examples=60, deadline=None)
@given(st.lists(values, max_size=40), st.integers(1, 30), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_levels_equal_brute_force_however_rows_arrive(some: list[float], repeat: int, pieces: list[int]) -> None:
    rows = rows_of(np.array(some * repeat, np.float32))
    pyramid, levels, at, turn = Pyramid(STEPS), {}, 0, 0
    while at < len(rows):
        size = pieces[turn % len(pieces)]
        for level, bands in pyramid.feed(rows[at:at + size]):
            levels.setdefault(level, []).append(bands)
        at, turn = at + size, turn + 1
    for level in (1, 2):
        group = FACTOR ** level
        bands = np.concatenate(levels[level]) if level in levels else []
        assert len(bands) == len(rows) // group
        for i, band in enumerate(bands):
            check_band(band, rows[i * group:(i + 1) * group], "loss_")


def read(tmp_path: Path, losses: np.ndarray, max_points: int, **options: int) -> np.ndarray:
    writer = Writer(make_run(tmp_path / "run"), **options)
    writer.open()
    writer.rows("steps", rows_of(losses))
    writer.close()
    return RunReader(tmp_path / "run").pyramid("steps", "loss", max_points)


@pytest.mark.parametrize("n, max_points", [(0, 10), (5, 10), (100, 10), (4999, 50), (70_001, 200), (70_001, 7)])
def test_views_cover_every_row_once(tmp_path: Path, n: int, max_points: int) -> None:
    losses = np.random.default_rng(n).normal(size=n).astype(np.float32)
    losses[::97] = np.nan
    bands = read(tmp_path, losses, max_points)
    assert bands.dtype == BAND and len(bands) <= max_points and bands["count"].sum() == n
    assert n == 0 or len(bands) > min(n, max_points) // 3
    at, rows = 0, rows_of(losses)
    for band in bands:
        check_band(band, rows[at:at + band["count"]])
        at += band["count"]


def test_an_isolated_spike_a_nan_and_an_inf_are_seen_from_afar(tmp_path: Path) -> None:
    losses = np.ones(100_000, np.float32)
    losses[54_321], losses[77_777], losses[12_345] = 1e6, np.nan, -np.inf
    bands = read(tmp_path, losses, 20)
    spike, nan, inf = (next(b for b in bands if b["first_step"] <= at + 1 <= b["last_step"]) for at in (54_321, 77_777, 12_345))
    assert spike["max"] == 1e6 and nan["nan"] == 1 and inf["inf"] == 1 and bands["nan"].sum() == bands["inf"].sum() == 1


def test_rows_deleted_by_the_cap_stay_in_the_bands(tmp_path: Path) -> None:
    n = 40_000
    losses = np.arange(n, dtype=np.float32)
    bands = read(tmp_path, losses, 100, cap_bytes=1 << 20)
    window = RunReader(tmp_path / "run").window()
    assert 0 < len(window.steps) < n and window.steps["step"][-1] == n
    assert bands["count"].sum() == n and bands["min"][0] == 0 and bands["max"][-1] == n - 1
    everything = RunReader(tmp_path / "run").pyramid("steps", "loss", 10 * n)
    assert everything["count"].sum() == n and everything["min"][0] == 0


def test_a_column_without_pyramid_is_reduced_from_the_rows(tmp_path: Path) -> None:
    read(tmp_path, np.zeros(1000, np.float32), 10)
    reader = RunReader(tmp_path / "run")
    bands = reader.pyramid("steps", "step", 10)
    assert len(bands) == 10 and bands["max"][-1] == 1000
    assert len(reader.pyramid("layers", "grad_norm", 10)) == 0 and len(reader.pyramid("rows", "hash", 10, rank=3)) == 0
    with pytest.raises(UsageError, match="no signal steps/lossy; known: step, t"):
        reader.pyramid("steps", "lossy")
