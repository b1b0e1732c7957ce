"""DataLoaders: construction, batches, passes, time waited, row fingerprints."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader

from osler.core.facts import Location
from osler.watch.compiler import passing, quiet
from osler.watch.observe import Observer
from osler.watch.readout import array, on_cpu, scalar, true
from osler.watch.session import Session
from osler.watch.tallies import sampler_figures
from osler.watch.trace import tensors_in
from osler.watch.where import construction_line, is_user, shorten, user_location

ROW_CAP = 60_000
COLUMNS = 256
NAN = float("nan")


class Loader:
    """What is known of one DataLoader."""

    def __init__(self, index: int, loader: Any) -> None:
        self.index = index
        self.ref = weakref.ref(loader)
        self.passes = 0


class Pass:
    """One pass over a loader."""

    def __init__(self, loader: Loader, number: int) -> None:
        self.loader, self.number = loader, number
        self.batches = self.rows = 0
        self.wait = 0.0
        self.first_size = self.last_size = 0
        self.phase = 0
        self.row_set = self.label_hash = 0
        self.hashed = 0
        self.step = 0


class Loaders:
    """All loaders of the process."""

    def __init__(self, session: Session, observer: Observer, training: Any) -> None:
        self.session, self.observer, self.training = session, observer, training
        self.known: dict[int, Loader] = {}
        self.iterators: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
        self.rows = 0
        self.count = 0
        self.batch_next = 0
        self.cost = 1e-4
        self.passed: Callable[[], None] = lambda: None
        self.data: dict[int, tuple[Any, int]] = {}

    @quiet
    def constructed(self, loader: Any) -> None:
        index = self.count
        self.count += 1
        entry = Loader(index, loader)
        self.known[id(loader)] = entry
        dataset = loader.dataset
        self.session.fact("loader", construction_line(loader), index=index, batch_size=loader.batch_size, sampler=type(loader.sampler).__name__,
                          shuffle=type(loader.sampler).__name__ == "RandomSampler", workers=loader.num_workers, drop_last=bool(loader.drop_last),
                          length=_length(loader), rows=_length(dataset), dataset=type(dataset).__name__, dataset_at=_json(_getitem_line(dataset)),
                          pin_memory=bool(loader.pin_memory), persistent=bool(loader.persistent_workers), same_data=self._first_over(dataset, index), **sampler_figures(loader), **_sharding(loader), **{"class": type(loader).__name__})
        if len(self.observer.loaders) < 8:
            self.observer.loaders.append((index, weakref.ref(loader)))

    def _first_over(self, dataset: Any, index: int) -> int | None:
        """The first loader over this very object; ``None`` where that cannot be told (lists have no weak references)."""
        try:
            ref = weakref.ref(dataset)
        except TypeError:
            return None
        known = self.data.get(id(dataset))
        if known is None or known[0]() is not dataset:
            known = self.data[id(dataset)] = (ref, index)
        return known[1]

    @quiet
    def begin(self, iterator: Any, loader: Any) -> None:
        entry = self.known.get(id(loader))
        if entry is None or entry.ref() is not loader:
            self.constructed(loader)
            entry = self.known[id(loader)]
        entry.passes += 1
        self.iterators[iterator] = Pass(entry, entry.passes)
        self.iterators[iterator].step = self.session.step
        number = entry.passes
        if number <= 3 or number & (number - 1) == 0:
            at, up = user_location()
            self.session.fact("loader-begin", at, loader=entry.index, pass_=number, grad=torch.is_grad_enabled() and self.observer.phase is None,
                              epochs=_epochs(loader), up=[place.to_json() for place in up])

    @quiet
    def served(self, iterator: Any, batch: Any, wait: float) -> None:
        run = self.iterators.get(iterator)
        self.training.data_wait += wait
        if run is None:
            return
        if self.session.fast and run.batches & (run.batches + 1) and self.observer.phase is None:
            run.batches += 1
            run.wait += wait
            run.rows += run.last_size
            return
        start = perf_counter()
        session = self.session
        phase = 0 if torch.is_grad_enabled() and self.observer.phase is None else 1
        run.batches += 1
        run.wait += wait
        run.phase = phase
        self.observer.last_loader = run.loader.index
        if self.observer.phase is not None:
            self.observer.phase.loader = run.loader.index
        tensors = tensors_in((batch,))
        self.observer.last_batch = [weakref.ref(t) for t in tensors[:4]]
        size = int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1
        run.rows += size
        run.first_size = run.first_size or size
        run.last_size = size
        if self.training.tracer.armed:
            self.training.tracer.event("@batch", outs=tensors, loader=run.loader.index)
        early = run.batches <= 4 or run.batches & (run.batches - 1) == 0
        detailed = (early and run.number <= 3) or (session.budget.allows(self.cost) and self.rows < ROW_CAP)
        if detailed:
            self._details(run, tensors, size, phase, wait)
            self.cost = perf_counter() - start
        session.own += perf_counter() - start

    def _details(self, run: Pass, tensors: list[torch.Tensor], size: int, phase: int, wait: float) -> None:
        session = self.session
        floats = next((t for t in tensors if t.is_floating_point() and on_cpu(t) and t.dim() >= 1 and t.numel()), None)
        labels = next((t for t in reversed(tensors) if not t.is_floating_point() and on_cpu(t) and t.dim() == 1 and t.shape[0] == size and t.dtype != torch.bool), None)
        if labels is None:
            labels = _float_labels(tensors, size)
        mean = std = entropy = NAN
        classes = -1
        if floats is not None:
            sample = floats.detach().flatten()[: 1 << 16].float()
            mean, std = scalar(sample.mean()), scalar(sample.std(unbiased=False))
        names = None
        if labels is not None:
            names = array(labels)
            values, counts = np.unique(names, return_counts=True)
            share = counts / counts.sum()
            entropy, classes = float(-(share * np.log(share)).sum()), len(values)
        session.row("batches", (session.step, session.now(), run.loader.index, phase, run.number, size, wait, mean, std, entropy, classes))
        inputs = floats if floats is not None else next((t for t in tensors if on_cpu(t) and t.dim() >= 2), None)
        if inputs is not None and inputs.dim() >= 2 and self.rows < ROW_CAP and (run.number <= 2 or (phase == 1 and run.number <= 3)):
            hashes = fingerprints(inputs)
            if hashes is not None:
                rows = np.empty(len(hashes), dtype=_ROWS)
                rows["loader"], rows["phase"], rows["pass_"] = run.loader.index, phase, run.number
                rows["position"] = np.arange(run.rows - size, run.rows)[: len(hashes)]
                rows["label"] = names.astype(np.int64)[: len(hashes)] if names is not None and len(names) == len(hashes) else -1
                rows["hash"] = hashes
                if session.writer is not None:
                    session.writer.rows("rows", rows)
                self.rows += len(hashes)
                with np.errstate(over="ignore"):
                    run.row_set = int(hashes.sum(dtype=np.uint64) + np.uint64(run.row_set))
                run.hashed += len(hashes)
        if names is not None:
            run.label_hash = hash((run.label_hash, names.tobytes()))

    @quiet
    def ended(self, iterator: Any) -> None:
        run = self.iterators.pop(iterator, None)
        if run is None:
            return
        session = self.session
        if session.writer is None:
            session.open()
        number = run.number
        if number <= 20 or number & (number - 1) == 0:
            session.fact("loader-pass", None, loader=run.loader.index, pass_=number, phase=run.phase, batches=run.batches, rows=run.rows, wait=run.wait,
                         first_size=run.first_size, last_size=run.last_size, row_set=str(run.row_set), label_hash=str(run.label_hash), hashed=run.hashed,
                         began_at_step=run.step)
        if session.step:
            self.passed()


from osler.core.signals import ROWS as _ROWS_STREAM  # noqa: E402

_ROWS = _ROWS_STREAM.dtype


def fingerprints(inputs: torch.Tensor) -> Any:
    """64-bit hash of each row of a CPU tensor [rows, ...]: up to 256 evenly spaced elements, rounded to float32.

    Returns:
        uint64 array [rows], or ``None`` for a type that cannot be read.
    """
    flat = inputs.detach().reshape(inputs.shape[0], -1)
    if flat.shape[1] > COLUMNS:
        flat = flat[:, :: flat.shape[1] // COLUMNS][:, :COLUMNS]
    values = array(flat)
    if values is None or values.dtype == object or np.iscomplexobj(values):
        return None
    values = np.ascontiguousarray(values, dtype=np.float32) + np.float32(0.0)
    bits = values.view(np.uint32).astype(np.uint64)
    random = np.random.Generator(np.random.PCG64(20)).integers(1, 1 << 63, size=bits.shape[1], dtype=np.uint64) | np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = bits * random
        mixed ^= mixed >> np.uint64(29)
        return (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(1, dtype=np.uint64)


def _float_labels(tensors: list[torch.Tensor], size: int) -> torch.Tensor | None:
    """A float target column that holds few whole numbers is a label too."""
    if len(tensors) < 2:
        return None
    last = tensors[-1]
    if last.is_floating_point() and on_cpu(last) and last.dim() <= 2 and last.numel() == size:
        flat = last.detach().flatten()
        if true((flat == flat.round()).all()) and scalar(flat.abs().max()) < 1000:
            return flat.long()
    return None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:
        return None


def _json(at: Location | None) -> Any:
    return at.to_json() if at is not None else None


def _told_epochs(loader: Any) -> list[tuple[str, Any]]:
    """The parts of a loader that have to be told the epoch."""
    parts = (("sampler", loader.sampler), ("batch_sampler", loader.batch_sampler), ("dataset", loader.dataset))
    return [(name, part) for name, part in parts if callable(getattr(type(part), "set_epoch", None))]


def _epochs(loader: Any) -> dict[str, int]:
    """What those parts believe the epoch to be."""
    found = {name: getattr(part, "epoch", None) for name, part in _told_epochs(loader)}
    return {name: epoch for name, epoch in found.items() if isinstance(epoch, int)}


def _sharding(loader: Any) -> dict[str, Any]:
    """What the sampler was told of the other ranks, as far as it keeps that in attributes of the usual names."""
    sampler = loader.sampler
    row = {"replicas": getattr(sampler, "num_replicas", None), "sampler_rank": getattr(sampler, "rank", None), "sampler_shuffle": getattr(sampler, "shuffle", None)}
    plain = {name: value for name, value in row.items() if isinstance(value, int)}
    return {**plain, "set_epoch": [name for name, _ in _told_epochs(loader)], "iterable": isinstance(loader.dataset, torch.utils.data.IterableDataset)}


def _getitem_line(dataset: Any) -> Location | None:
    """Where the user's dataset (looking through Subset and ConcatDataset) defines ``__getitem__`` or ``__iter__``."""
    for _ in range(5):
        for name in ("__getitem__", "__iter__"):
            method = getattr(type(dataset), name, None)
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and is_user(code):
                return Location(shorten(code.co_filename), code.co_firstlineno, f"{type(dataset).__name__}.{name}")
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return None


def install(session: Session, loaders: Loaders) -> None:
    guard = session.guard
    original_init = DataLoader.__init__

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        if guard.armed("loader"):
            try:
                loaders.constructed(self)
            except Exception:
                guard.failed("loader")

    DataLoader.__init__ = passing(__init__)
    base = torch_loader._BaseDataLoaderIter
    original_base = base.__init__

    @functools.wraps(original_base)
    def iterator_init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original_base(self, loader, *args, **kwargs)
        if guard.armed("loader"):
            try:
                loaders.begin(self, loader)
            except Exception:
                guard.failed("loader")

    base.__init__ = passing(iterator_init)
    several = torch_loader._MultiProcessingDataLoaderIter
    original_reset = several._reset

    @functools.wraps(original_reset)
    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        """Persistent workers: one iterator serves every pass."""
        original_reset(self, loader, first_iter)
        if not first_iter and guard.armed("loader"):
            try:
                loaders.begin(self, loader)
            except Exception:
                guard.failed("loader")

    several._reset = passing(_reset)
    original_next = base.__next__
    tracer = loaders.training.tracer

    @functools.wraps(original_next)
    def __next__(self: Any) -> Any:
        start = perf_counter()
        tracer.paused += 1
        try:
            batch = original_next(self)
        except StopIteration:
            if guard.armed("loader"):
                try:
                    loaders.ended(self)
                except Exception:
                    guard.failed("loader")
            raise
        finally:
            tracer.paused -= 1
        if guard.armed("loader"):
            try:
                loaders.served(self, batch, perf_counter() - start)
            except Exception:
                guard.failed("loader")
        return batch

    base.__next__ = passing(__next__)
