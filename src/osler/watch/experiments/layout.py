"""Which axis of the inputs counts the samples, which counts time, and a small sub-batch to experiment on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from osler.watch.experiments.nested import Path
from osler.watch.experiments.subject import Subject, Tensors, Unclear, is_mask, perturbable

SAMPLES = 8
AGREE = 0.95
IGNORED = -100
LABELS = ("labels", "targets", "target", "decoder_labels")


@dataclass(frozen=True, slots=True)
class Shift:
    """The target repeats the input, moved by ``by`` positions along the time axis ``axis`` of the input at ``path``.

    ``share`` of the positions agree; ``unmoved`` is the share that equals the input at the same position.
    """

    path: Path
    axis: int
    by: int
    share: float
    unmoved: float


@dataclass(frozen=True)
class Layout:
    """Where the samples are.

    Attributes:
        n: number of samples; axes: batch axis of every input that has one.
        by: what told so ("target", "loader", "shift", "state", "assumed").
        ambiguous: the other leading axis of the main input may count the samples as well.
        graph: an input relates samples to each other (adjacency, edge list, sparse matrix): mixing is by design.
    """

    main: Path
    axis: int
    n: int
    axes: dict[Path, int]
    by: str
    ambiguous: bool
    graph: bool

    def along(self, inputs: Tensors, axis: int) -> dict[Path, int]:
        """Axes of the same length, had the samples been along ``axis`` of the main input."""
        return _axes(inputs, self.main, axis)


def _axes(inputs: Tensors, main: Path, axis: int) -> dict[Path, int]:
    n = inputs[main].shape[axis]
    axes = {main: axis}
    for path, tensor in inputs.items():
        if path != main and n in tensor.shape:
            dims = [a for a, size in enumerate(tensor.shape) if size == n]
            axes[path] = axis if axis in dims else dims[0]
    return axes


def find_shift(subject: Subject) -> Shift | None:
    """The input that the target repeats, if the task is to predict the next (or the same) elements of a sequence."""
    target = subject.capture.target
    if target is None or target.dim() == 0:
        return None
    found: list[Shift] = []
    whole = [p for p, t in subject.inputs.items() if not t.is_floating_point() and t.dim() == 2 and not is_mask(t)]
    for path, tensor in subject.inputs.items():
        if tensor.is_floating_point() == target.is_floating_point() and tensor.dim() == 2 + tensor.is_floating_point() and not is_mask(tensor):
            # The target itself may be an argument beside the real input (labels of an encoder-decoder).
            labels = path[-1] in LABELS or (len(whole) > 1 and tensor.untyped_storage().data_ptr() == target.untyped_storage().data_ptr())
            found += [s for axis in (1, 0) for s in _shifts(path, tensor, target, axis) if s.share >= AGREE and not (labels and s.by == 0)]
    found.sort(key=lambda s: (-s.share, s.by != 1))
    # Labels handed to the module agree as well, but do not matter to its outputs (only to a loss it computes).
    matters = {(s.path, s.axis): _matters(subject, s) for s in found}
    return next((s for s in found if matters[s.path, s.axis]), None)


def _matters(subject: Subject, shift: Shift) -> bool:
    axes = _axes(subject.inputs, shift.path, 1 - shift.axis)
    few: Tensors = {p: subject.inputs[p].detach().narrow(a, 0, min(4, subject.inputs[p].shape[a])) for p, a in axes.items()}
    try:
        base = subject.run(few)
    except Exception:
        few = {shift.path: subject.inputs[shift.path]}
        base = subject.run(few)
    after = subject.run({**few, shift.path: few[shift.path].flip(0, 1)})
    return any(t.dim() > 0 and not torch.equal(t, after.get(p, t)) for p, t in base.items())


def _shifts(path: Path, tensor: torch.Tensor, target: torch.Tensor, axis: int) -> Iterator[Shift]:
    """Agreement at shifts from -2 to 2, time along ``axis``; the target may be flattened and one step shorter."""
    x = tensor.detach()
    steps, width = x.shape[axis], x.shape[1 - axis]
    if steps < 4 or bool((x == x.flatten()[0]).all()):
        return
    inner = tuple(x.shape[2:])
    for length in (steps, steps - 1):
        shape = (width, length) if axis == 1 else (length, width)
        y = target.detach()
        if y.numel() != width * length * (inner[0] if inner else 1) or (y.dim() >= 2 and tuple(y.shape[:2]) != shape):
            continue
        y = y.reshape(*shape, *inner)
        a, b = (x, y) if axis == 1 else (x.transpose(0, 1), y.transpose(0, 1))
        shares = {by: _share(a, b, by) for by in (1, 0, 2, -1, -2)}
        yield from (Shift(path, axis, by, share, shares[0]) for by, share in shares.items())


def _share(x: torch.Tensor, y: torch.Tensor, by: int) -> float:
    low, high = max(0, -by), min(y.shape[1], x.shape[1] - by)
    if high - low < 2:
        return 0.0
    a, b = x[:, low + by:high + by], y[:, low:high]
    valid = b != IGNORED
    equal = torch.isclose(a, b, rtol=1e-5, atol=1e-7) if a.is_floating_point() else a == b
    return float((equal & valid).sum()) / max(int(valid.sum()), 1) if int(valid.sum()) >= 4 else 0.0


def find_layout(subject: Subject, shift: Shift | None) -> Layout:
    """The batch axis of the inputs.

    Raises:
        Unclear: no tensor input, a single sample, or nothing tells the samples.
    """
    inputs = subject.inputs
    main = shift.path if shift else next((p for p, t in inputs.items() if t.dim() > 0 and t.numel() > 1), None)
    if main is None:
        raise Unclear("the module gets no tensor with more than one element")
    axis, by, ambiguous = _batch_axis(subject, main, shift)
    n = inputs[main].shape[axis]
    if n < 2:
        raise Unclear("one sample only")
    axes = _axes(inputs, main, axis)
    held = [t for m in subject.root.modules() for t in (*m._buffers.values(), *vars(m).values()) if isinstance(t, torch.Tensor)]
    graph = any(_relates(t, n) for t in (*held, *(t for p, t in inputs.items() if p != main)))
    return Layout(main, axis, n, axes, by, ambiguous, graph)


def _relates(tensor: torch.Tensor, n: int) -> bool:
    """An adjacency matrix (dense or sparse) or a list of edges among ``n`` samples."""
    if tensor.layout != torch.strided or (tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] == n):
        return True
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return bool(whole and tensor.dim() == 2 and tensor.shape[0] == 2 and n > 2 and tensor.numel() and int(tensor.max()) < n)


def _batch_axis(subject: Subject, main: Path, shift: Shift | None) -> tuple[int, str, bool]:
    x, target = subject.inputs[main], subject.capture.target
    first, second = x.shape[0], x.shape[1] if x.dim() > 1 else -1
    if shift is not None:
        return 1 - shift.axis, "shift", False
    outputs = list(subject.outputs.values())
    per_position = x.dim() in (2, 3) and any(o.dim() >= 2 and tuple(o.shape[:2]) == (first, second) for o in outputs)
    if target is not None and target.dim() and not (per_position and target.numel() >= first * second > first):
        if target.shape[0] == first:
            return 0, "target", False
        if target.shape[0] == second:
            return 1, "target", False
    for path, tensor in subject.inputs.items():
        # A recurrent state [layers, batch, hidden] knows the batch.
        if path != main and tensor.dim() == 3 and first != second and tensor.shape[1] in (first, second):
            return (0 if tensor.shape[1] == first else 1), "state", False
    sizes = {getattr(loader, "batch_size", None) for _, loader in subject.capture.loaders}
    if first != second and len(sizes & {first, second}) == 1:
        return (0 if first in sizes else 1), "loader", False
    if any(o.dim() and o.shape[0] == first for o in outputs) or (target is not None and target.dim() and target.shape[0] % first == 0):
        return 0, "assumed", per_position or (target is None and x.dim() in (2, 3))
    if any(o.dim() and o.shape[0] == second for o in outputs):
        return 1, "assumed", True
    raise Unclear("neither the outputs nor the target tell which axis counts the samples")


class Batch:
    """A few of the captured samples, as many as no other axis is long, so that the samples' axis can be told by its length.

    Falls back to all samples where the module insists on its batch size (``fixed``). The module must be in evaluation mode.
    """

    def __init__(self, subject: Subject, axes: dict[Path, int], n: int) -> None:
        self.subject, self.axes = subject, axes
        taken = {size for t in (*subject.root.parameters(), *subject.root.buffers()) for size in t.shape}
        taken |= {size for p, t in subject.inputs.items() for a, size in enumerate(t.shape) if axes.get(p) != a}
        wish = [k for k in (7, 5, 8, 6, 11, 9, 10, 4, 3) if k <= n and k not in taken]
        self.n = wish[0] if wish else min(n, SAMPLES)
        self.fixed = False
        try:
            self.inputs = self.take(torch.arange(self.n) * n // self.n)
            self.base = subject.run(self.inputs)
        except Exception:
            if self.n == n:
                raise
            self.n, self.fixed = n, True
            self.inputs = self.take(torch.arange(n))
            self.base = subject.run(self.inputs)

    def take(self, index: torch.Tensor) -> Tensors:
        return {path: self.subject.inputs[path].detach().index_select(axis, index) for path, axis in self.axes.items()}

    def reordered(self, order: torch.Tensor) -> Tensors:
        return {path: tensor.index_select(self.axes[path], order) for path, tensor in self.inputs.items()}

    @cached_property
    def repeats(self) -> bool:
        """Two passes with the same random state agree: only then a difference means something."""
        again = self.subject.run(self.inputs)
        return again.keys() == self.base.keys() and all(torch.equal(torch.nan_to_num(again[p]), torch.nan_to_num(t)) for p, t in self.base.items())

    @cached_property
    def judged(self) -> dict[Path, bool]:
        """Outputs whose shape depends on the number of samples, and whether in two axes at once (a similarity matrix)."""
        def sizes(n: int, outputs: Tensors) -> dict[Path, bool]:
            return {p: sum(size == n for size in t.shape) >= 2 for p, t in outputs.items() if any(size and size % n == 0 for size in t.shape)}

        try:
            fewer = self.subject.run(self.reordered(torch.arange(self.n - 1))) if self.n > 2 else None
        except Exception:
            fewer = None
        if fewer is None or fewer.keys() != self.base.keys():
            return sizes(self.n, self.base)
        moved = {p: [a != b for a, b in zip(t.shape, fewer[p].shape, strict=True)] for p, t in self.base.items() if t.dim() == fewer[p].dim()}
        return {p: sum(m) >= 2 for p, m in moved.items() if any(m)}

    def changed(self, index: int) -> Tensors:
        """The inputs with the content of sample ``index`` replaced by that of the sample least like it."""
        new = dict(self.inputs)
        for path in perturbable(self.inputs, self.axes):
            rows = self.inputs[path].movedim(self.axes[path], 0)
            apart = (rows - rows[index]).abs().reshape(self.n, -1).double().nan_to_num().sum(1)
            other = rows.clone()
            if float(apart.max()) > 0:
                other[index] = rows[int(apart.argmax())]
            elif rows.is_floating_point():
                other[index] = rows[index] * 1.5 + 0.1
            else:
                continue
            new[path] = other.movedim(0, self.axes[path])
        return new
