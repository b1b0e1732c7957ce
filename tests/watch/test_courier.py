"""Values of device tensors arrive later and are the same ones. There need be no GPU: the host plays the device.

The tests take ``cpu`` out of the devices that can be read at once, and let copies arrive some polls after they were sent. What
a GPU alone can show (no synchronisation, streams, graph capture) is in ``tests/harm/test_source.py`` and skipped without one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osler.store.files import write_json
from osler.store.reader import RunReader
from osler.watch import courier, readout
from osler.watch.courier import Courier, Late, LateRows, Link


class Slow(Link):
    """Copies at once, as a stream would in its order, and says so only after ``polls`` questions."""

    def __init__(self, polls: int = 2) -> None:
        self.polls = polls
        self.waits = self.clock = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def usable(self, tensor: torch.Tensor) -> bool:
        return True

    def mark(self, device: torch.device) -> Any:
        link = self

        class Event:
            born = link.clock

            def query(self) -> bool:
                link.clock += 1
                return link.clock - self.born > link.polls

            def synchronize(self) -> None:
                link.waits += 1

        return Event()


class Far(Courier):
    """The host is a device, except for what has arrived."""

    def carry(self, tensors: Sequence[torch.Tensor], then: Callable[..., None]) -> bool:
        def landed(*copies: torch.Tensor) -> None:
            readout.HOST.add("cpu")
            try:
                then(*copies)
            finally:
                readout.HOST.discard("cpu")

        return super().carry(tensors, landed)


@pytest.fixture
def far() -> Iterator[Far]:
    readout.HOST.discard("cpu")
    yield Far(Slow())
    readout.HOST.add("cpu")


def test_scalars_cross_together(far: Far) -> None:
    said: list[float] = []
    late = [far.scalar(torch.tensor(float(i)), said.append) for i in range(courier.FLUSH_VALUES)]
    assert not any(x.ready for x in late)
    for _ in range(4):
        far.poll()
    assert [x.value for x in late] == [float(i) for i in range(courier.FLUSH_VALUES)] == said
    assert not far.busy


def test_a_slot_is_used_again_only_after_its_copy(far: Far) -> None:
    first = [far.scalar(torch.tensor(1.0)) for _ in range(courier.FLUSH_VALUES)]
    far.poll()
    second = [far.scalar(torch.tensor(2.0)) for _ in range(3)]
    far.finish()
    assert {x.value for x in first} == {1.0}
    assert {x.value for x in second} == {2.0}


def test_a_full_ring_gives_gaps_not_errors(far: Far) -> None:
    late = [far.scalar(torch.tensor(0.0)) for _ in range(courier.RING + 5)]
    assert [x.ready for x in late[-5:]] == [True] * 5
    assert all(math.isnan(x.value) for x in late[-5:])


def test_carry_keeps_the_values_of_the_moment(far: Far) -> None:
    tensor, seen = torch.ones(3), []
    assert far.carry((tensor,), lambda values: seen.append(values.tolist()))
    tensor.zero_()
    far.finish()
    assert seen == [[1.0, 1.0, 1.0]]
    assert isinstance(far.link, Slow)
    assert far.link.waits == 1


def test_what_is_too_large_or_too_much_is_refused(far: Far) -> None:
    assert not far.carry((torch.ones(courier.LIMIT + 1),), lambda _: None)
    for _ in range(courier.IN_FLIGHT):
        assert far.carry((torch.ones(1),), lambda _: None)
    assert not far.carry((torch.ones(1),), lambda _: None)


def test_host_tensors_are_handed_over_at_once() -> None:
    seen: list[float] = []
    Courier(Slow()).carry((torch.tensor(3.0),), lambda v: seen.append(float(v)))
    assert seen == [3.0]


def test_rows_keep_their_order() -> None:
    out: list[tuple[Any, ...]] = []
    rows, late = LateRows(out.append), Late()
    rows.add((1, late), True)
    rows.add((2, 5.0), False)
    rows.flush()
    assert out == []
    late.arrive(4.0)
    rows.flush()
    assert out == [(1, 4.0), (2, 5.0)]


def train(folder: Path, away: bool, spoil: bool = False) -> RunReader:
    """In a process of its own, since taps go in once."""
    import subprocess

    folder.mkdir()
    write_json(folder / "run.json", {"schema": 1, "id": folder.name})
    done = subprocess.run([sys.executable, __file__, str(folder), str(int(away)), str(int(spoil))], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    reader = RunReader(folder)
    reader.refresh()
    return reader


def script(folder: Path, away: bool, spoil: bool) -> None:
    from osler.watch.install import install

    torch.set_num_threads(1)
    session = install(folder, budget=1.0)
    assert session is not None
    if away:
        readout.HOST.discard("cpu")
        session.courier = Far(Slow())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss()
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    for step in range(60):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if spoil and step == 40:
            loss = loss * float("nan")
        before = loss.detach().clone()
        loss.backward()
        assert bool((loss.detach() == before).all()) or spoil, "the watcher wrote into the loss"
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                criterion(model(x), y)
            model.train()


def test_a_device_run_records_what_a_host_run_records(tmp_path: Path) -> None:
    near, away = (train(tmp_path / name, name == "away").window(0) for name in ("near", "away"))
    assert len(near.steps) == len(away.steps) == 60
    for column in ("loss", "grad_norm"):
        values = [{int(r["step"]): float(r[column]) for r in w.steps if np.isfinite(r[column])} for w in (near, away)]
        seen = sorted(values[0].keys() & values[1].keys())
        assert len(seen) >= 8, column
        np.testing.assert_allclose([values[0][k] for k in seen], [values[1][k] for k in seen], rtol=1e-5)
    for stream, key, values in (("layers", "param", ("grad_norm", "weight_norm", "update_norm", "descent", "zero_share")),
                                ("activations", "module", ("mean", "std", "zero_share", "dead_share", "row_spread"))):
        rows = [{(int(r["step"]), int(r[key])): r for r in w.stream(stream)} for w in (near, away)]
        both = rows[0].keys() & rows[1].keys()
        assert len(both) >= 12, stream
        for name in values:
            np.testing.assert_allclose([rows[0][k][name] for k in sorted(both)], [rows[1][k][name] for k in sorted(both)], rtol=1e-4, atol=1e-6)
    calls = [{(int(r["step"]), int(r["phase"])): (float(r["value"]), float(r["accuracy"])) for r in w.calls} for w in (near, away)]
    both = calls[0].keys() & calls[1].keys()
    assert {phase for _, phase in both} == {0, 1}
    assert all(calls[0][k] == pytest.approx(calls[1][k], rel=1e-5) for k in both)
    inits = [{p["name"]: p["init"] for f in w.facts("params") for p in f.get("params")} for w in (near, away)]
    assert inits[0] == inits[1]
    assert all(inits[1].values())
    assert {f.get("phase") for f in away.facts("input")} == {"train", "validation"}
    assert not [f for f in away.facts("self") if f.get("what") == "guard"]


def test_a_device_loss_that_is_not_finite_is_noticed(tmp_path: Path) -> None:
    window = train(tmp_path / "run", True, True).window(0)
    found = window.facts("nonfinite")
    assert found
    assert found[0].get("what") == "loss"
    assert found[0].get("value") == "nan"
    assert 40 <= found[0].get("seen_at") < 60  # in the fast lane a block of steps is added up


def test_measuring_reads_no_values() -> None:
    """On tensors without data whatever depends on a value fails: what is computed on a device is computed blindly."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from osler.watch import criteria, sampling, snapshot

    with FakeTensorMode():
        weights = [torch.empty(64, 32), torch.empty(64)]
        total = torch.linalg.vector_norm(sampling.norms(weights))
        assert total.shape == ()
        assert sampling.thinned(torch.empty(512, 64, 9, 9)).numel() <= 4 * sampling.ELEMENTS
        value, target = criteria.first_rows(torch.empty(1 << 12, 1 << 10), torch.empty(1 << 12, dtype=torch.long))
        assert value is not None
        assert target is not None
        assert value.numel() <= courier.LIMIT
        values = snapshot.sample(torch.empty(1 << 10, 1 << 10))
        assert values is not None


if __name__ == "__main__":
    script(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1")
