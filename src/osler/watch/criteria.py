"""What is learned of each criterion call: shapes, ranges, row sums, targets, accuracy. Fully looked at for a few calls of
each (function, line), then on sampled ones; validation calls always leave a row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from osler.core.facts import Location
from osler.watch.compiler import quiet
from osler.watch.courier import LIMIT
from osler.watch.graph import chain, maker
from osler.watch.observe import Observer
from osler.watch.operands import spread
from osler.watch.readout import on_cpu, scalar, true
from osler.watch.session import Session
from osler.watch.tallies import Tally
from osler.watch.where import is_user, user_line

CLASSIFICATION = frozenset(("cross_entropy", "nll_loss", "multi_margin_loss"))
PROBABILISTIC = frozenset(("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"))
SIZE_LIMIT = 1 << 21
SHARES = ("rows_sum_one", "in_unit", "log_probs", "broadcast", "target_rows_sum_one", "target_integers", "single_unit", "target_in_unit", "target_one_hot")


class Criterion:
    """Running figures of one criterion at one line."""

    def __init__(self, index: int, function: str, at: Location | None, built: Location | None, phase: int) -> None:
        self.index, self.function, self.at, self.built, self.phase = index, function, at, built, phase
        self.calls = 0
        self.first_step = 0
        self.sampled = 0
        self.next_write = 1
        self.shares: dict[str, list[int]] = {}
        self.info: dict[str, Any] = {}
        self.value_first = self.value_last = float("nan")
        self.accuracy_first = self.accuracy_last = float("nan")
        self.target_min, self.target_max = float("inf"), float("-inf")
        self.classes: set[int] = set()
        self.ignored = self.counted = self.padded = 0
        self.numbers: dict[str, float] = {}
        self.value_min = float("inf")
        self.value_max = float("-inf")
        self.tally = Tally()

    def mark(self, key: str, value: bool) -> None:
        pair = self.shares.setdefault(key, [0, 0])
        pair[0] += int(value)
        pair[1] += 1

    def figures(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Sums over all sampled targets, and the spread of predictions in the first and the newest sampled call."""
        numbers = self.numbers
        made = spread(x)
        if made is not None:
            self.info.setdefault("prediction_first", made)
            self.info["prediction_last"] = made
        std, mean = torch.std_mean(y, unbiased=False)
        m, n = scalar(mean), y.numel()
        if y.dim() == 2 and 1 < y.shape[1] <= 64 and y.shape[0] > 1:
            numbers["within"] = numbers.get("within", 0.0) + scalar(y.var(0, unbiased=False).mean()) * n
        for key, value in (("n", float(n)), ("sum", m * n), ("squares", (scalar(std) ** 2 + m * m) * n), ("below_zero", scalar((y < -1e-6).sum())),
                           ("above_one", scalar((y > 1 + 1e-6).sum())), ("below_minus_one", scalar((y < -1 - 1e-6).sum()))):
            numbers[key] = numbers.get(key, 0.0) + value

    def target_figures(self) -> dict[str, Any]:
        n = self.numbers.get("n")
        if not n:
            return {}
        mean = self.numbers["sum"] / n
        within = {"target_std_within": (self.numbers["within"] / n) ** 0.5} if "within" in self.numbers else {}
        return {**within, "target_mean": mean, "target_std": max(self.numbers["squares"] / n - mean * mean, 0.0) ** 0.5,
                **{f"target_{key}": self.numbers[key] / n for key in ("below_zero", "above_one", "below_minus_one")}}

    def to_json(self) -> dict[str, Any]:
        finite = self.target_min <= self.target_max
        return {"index": self.index, "function": self.function, "built_at": self.built.to_json() if self.built else None, "calls": self.calls, "first_step": self.first_step,
                "sampled": self.sampled, "phase": self.phase, **self.info, **self.target_figures(), **{k: a / n for k, (a, n) in self.shares.items()},
                "target_min": self.target_min if finite else None, "target_max": self.target_max if finite else None,
                "target_classes": len(self.classes), "target_values": sorted(self.classes)[:20],
                "ignored_share": self.ignored / self.counted if self.counted else None,
                "pad_share": self.padded / self.counted if self.counted and "pad" in self.info else None,
                "value_first": self.value_first, "value_last": self.value_last, "accuracy_first": self.accuracy_first,
                "accuracy_last": self.accuracy_last, "input_min": self.value_min if self.value_min <= self.value_max else None,
                "input_max": self.value_max if self.value_min <= self.value_max else None, **self.tally.to_json()}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a criterion: ``step`` and ``t`` are those of the call, ``first`` says that it is the first one looked at."""

    criterion: Criterion
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: int
    step: int
    t: float
    first: bool
    batch: int


def first_rows(value: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As many first rows of both as may be copied from a device."""
    if value.numel() <= LIMIT and target.numel() <= LIMIT:
        return value, target
    rows = value.shape[0] if value.dim() and target.dim() and value.shape[0] == target.shape[0] else 0
    keep = LIMIT * rows // max(value.numel(), target.numel(), 1)
    return (value[:keep], target[:keep]) if keep else (None, None)


def positions(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Integer targets as a table of sequences, where their shape or that of the scores before flattening tells it."""
    y = target.detach()
    if y.dim() == 2:
        return y
    if y.dim() != 1:
        return None
    shapes = [tuple(base.shape) for base in (target._base, scores._base) if base is not None]
    saved = getattr(scores.grad_fn, "_saved_self_sym_sizes", None)
    for shape in (*shapes, tuple(saved or ())):
        if len(shape) >= 2 and shape[0] * shape[1] == y.numel() and shape[1] > 1:
            return y.reshape(shape[0], shape[1])
    return None


def trailing(table: torch.Tensor | None, ignore: int) -> int | None:
    """The number that fills up sequences: it stands in runs of different lengths at their ends (or, transposed, in the last rows) and nowhere else."""
    if table is None or min(table.shape) < 4 or table.numel() > 65536:
        return None
    for rows in (table, table.T):
        kept = rows[:, ~(rows == ignore).all(0)]
        if kept.shape[1] < 4:
            continue
        values, counts = kept[:, -1].unique(return_counts=True)
        value = values[counts.argmax()]
        runs = (kept == value).flip(1).long().cumprod(1).sum(1)
        if int(scalar(value)) != ignore and scalar((runs > 1).sum()) >= 0.25 * len(kept) and len(runs.unique()) >= 3 and scalar(runs.max()) < kept.shape[1] \
                and int(scalar((kept == value).sum())) == int(scalar(runs.sum())):
            return int(scalar(value))
    return None


class Criteria:
    """All criterions of the process."""

    def __init__(self, session: Session, observer: Observer) -> None:
        self.session = session
        self.observer = observer
        self.known: dict[Any, Criterion] = {}
        self.with_grad = 0
        self.train_next = 0
        self.cost = 5e-5
        self._pad_looks = 0
        self._pad_index: int | None = None
        self._run_looks = 0
        self._run_value: int | None = None
        session.finishers.append(self.finish)

    def unused(self, backwards: int) -> int:
        return max(self.with_grad - backwards, 0)

    @quiet
    def seen(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        session = self.session
        grad = isinstance(result, torch.Tensor) and result.requires_grad
        if grad:
            self.with_grad += 1
        phase = 0 if grad or (torch.is_grad_enabled() and session.step == 0) else 1
        if phase == 0:
            training = self.observer.phase is None or self.observer.phase.grad_enabled
            if training and self.with_grad > 12 and (self.with_grad < self.train_next or not session.budget.allows(self.cost)):
                return
            self.train_next = self.with_grad + (1 if self.with_grad < 12 else 1 + self.with_grad // 30)
        elif session.budget.tight and self.observer.phases > 8 and found_enough(self.observer.phases):
            return
        start = perf_counter()
        key = self._key(function, phase)
        found = self.known.get(key)
        if found is None:
            if len(self.known) > 60:
                return
            at = user_line()
            found = self.known[key] = Criterion(len(self.known), function, at, self._built(), phase)
            found.first_step = session.step
        found.calls += 1
        value = args[0] if args else kwargs.get("input", kwargs.get("log_probs"))
        target = args[1] if len(args) > 1 else kwargs.get("target", kwargs.get("targets"))
        if self.observer.phase is not None and phase == 1:
            self.observer.phase.criterion_calls += 1
            self.observer.phase.line = self.observer.phase.line or found.at
        if isinstance(value, torch.Tensor):
            found.sampled += 1
            self._structure(found, value, target, args, kwargs, result)
        call = Call(found, function, (None, None, *args[2:]), kwargs, phase, session.step, session.now(), found.sampled == 1,
                    value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else 1)
        self._measure(call, value, target, result)
        if grad and self.observer.tracer.armed:
            self.observer.criterion(value, target)
        if found.calls >= found.next_write:
            found.next_write *= 2
            session.fact("criterion", found.at, **found.to_json())
        self.cost = perf_counter() - start
        session.own += self.cost

    def _measure(self, call: Call, value: Any, target: Any, result: Any) -> None:
        """Figures of one call: now if its tensors are on the host, and from copies of them later if they are not."""
        given = [v for v in (value, target, result) if isinstance(v, torch.Tensor)]
        if all(on_cpu(t) for t in given):
            self._figures(call, value, target, result)
            return
        if isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor):
            value, target = first_rows(value, target)
        every = {"value": value, "target": target, "result": result}
        brought = {n: v for n, v in every.items() if isinstance(v, torch.Tensor)}
        names, rest = list(brought), {n: v for n, v in every.items() if n not in brought}
        self.session.courier.carry(list(brought.values()), lambda *copies: self._figures(call, **rest, **dict(zip(names, copies, strict=True))))

    @quiet
    def _figures(self, call: Call, value: Any, target: Any, result: Any) -> None:
        found, args, kwargs = call.criterion, call.args, call.kwargs
        accuracy = float("nan")
        if isinstance(value, torch.Tensor):
            accuracy = self._look(found, value, target, args, kwargs)
            if value.numel() <= SIZE_LIMIT:
                found.tally.look(call.function, value, target, result, kwargs if "weight" in kwargs or len(args) < 3 else {"weight": args[2], **kwargs},
                                 -100 if found.info.get("ignore_index") is None else found.info["ignore_index"])
        number = scalar(result) if isinstance(result, torch.Tensor) else float("nan")
        if call.first:
            found.value_first, found.accuracy_first = number, accuracy
        found.value_last = number
        found.accuracy_last = accuracy if accuracy == accuracy else found.accuracy_last
        self.session.row("calls", (call.step, call.t, found.index, call.phase, call.batch, number, accuracy))

    @staticmethod
    def _key(function: str, phase: int) -> tuple[str, Any, int, int]:
        frame = sys._getframe(3)
        while frame.f_back is not None and not is_user(frame.f_code):
            frame = frame.f_back
        return function, frame.f_code, frame.f_lineno, phase

    def _built(self) -> Location | None:
        frame = sys._getframe(3)
        for _ in range(4):
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            if isinstance(owner, nn.Module):
                return self.session.registry.built_at(owner)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return None

    def _structure(self, found: Criterion, value: torch.Tensor, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if found.sampled <= 2:
            found.info.update(
                input={"shape": list(value.shape), "dtype": _dtype(value), "requires_grad": value.requires_grad},
                target={"shape": list(target.shape), "dtype": _dtype(target), "requires_grad": target.requires_grad} if isinstance(target, torch.Tensor) else None,
                reduction=kwargs.get("reduction", "mean"), ignore_index=kwargs.get("ignore_index"), weight=isinstance(kwargs.get("weight"), torch.Tensor)
                or (len(args) > 2 and isinstance(args[2], torch.Tensor)), label_smoothing=kwargs.get("label_smoothing"), log_target=kwargs.get("log_target"),
                log_input=kwargs.get("log_input", args[2] if len(args) > 2 and isinstance(args[2], bool) else None),
                input_op=maker(value.grad_fn) if value.grad_fn is not None else None,
                input_chain=chain(value.grad_fn) if value.grad_fn is not None else [], result_numel=result.numel() if isinstance(result, torch.Tensor) else None)
            if isinstance(kwargs.get("pos_weight"), torch.Tensor):
                found.info["pos_weight"] = True

    def _look(self, found: Criterion, value: torch.Tensor, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if not on_cpu(value) or value.numel() == 0 or value.numel() > SIZE_LIMIT:
            return float("nan")
        accuracy = float("nan")
        with torch.no_grad():
            x = value.detach().float()
            if found.function in PROBABILISTIC:
                low, high = scalar(x.min()), scalar(x.max())
                found.value_min, found.value_max = min(found.value_min, low), max(found.value_max, high)
                found.mark("in_unit", low >= 0 and high <= 1)
                if x.dim() >= 2 and found.function in ("cross_entropy", "nll_loss", "kl_div"):
                    dim = 1 if found.function != "kl_div" else -1
                    found.mark("single_unit", x.shape[dim] == 1)
                    if x.shape[dim] > 1:
                        sums = x.sum(dim)
                        found.mark("rows_sum_one", low >= -1e-6 and scalar((sums - 1).abs().max()) < 1e-3)
                        found.mark("log_probs", high <= 1e-5 and scalar(x.logsumexp(dim).abs().max()) < 1e-3)
            if isinstance(target, torch.Tensor) and on_cpu(target):
                if target.shape != value.shape and found.function in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
                                                                      "poisson_nll_loss", "soft_margin_loss"):
                    found.mark("broadcast", True)
                accuracy = self._target(found, x, value, target, kwargs, args)
        return accuracy

    def _target(self, found: Criterion, x: torch.Tensor, value: torch.Tensor, target: torch.Tensor, kwargs: dict[str, Any], args: tuple[Any, ...]) -> float:
        y = target.detach()
        if y.numel() == 0 or y.numel() > SIZE_LIMIT:
            return float("nan")
        if y.is_floating_point() or y.dtype == torch.bool:
            y = y.float()
            low, high = scalar(y.min()), scalar(y.max())
            found.target_min, found.target_max = min(found.target_min, low), max(found.target_max, high)
            found.figures(x, y)
            found.mark("target_in_unit", low >= 0 and high <= 1)
            found.mark("target_integers", true((y == y.round()).all()))
            if y.dim() == 2 and y.shape[1] > 1:
                ones = scalar((y.sum(1) - 1).abs().max()) < 1e-3 and low >= 0
                found.mark("target_rows_sum_one", ones)
                found.mark("target_one_hot", ones and high == 1 and true((y.max(1).values == 1).all()))
            if y.numel() <= 65536:
                self._classes(found, y)
            return float("nan")
        ignore = kwargs.get("ignore_index", args[3] if len(args) > 3 and isinstance(args[3], int) and found.function == "cross_entropy" else -100)
        kept = y != ignore
        found.ignored += int(scalar((~kept).sum()))
        found.counted += y.numel()
        found.info["ignore_index"] = ignore
        good = y[kept]
        pad = self._pad()
        if self._run_looks < 8:
            self._run_looks += 1
            self._run_value = trailing(positions(value, target), ignore) if self._run_value is None else self._run_value
        if self._run_value is not None and pad in (None, self._run_value):
            pad, found.info["pad_by"] = self._run_value, "trailing runs"
        if pad is not None:
            found.padded += int(scalar((good == pad).sum()))
            found.info["pad"] = pad
        if good.numel() == 0:
            return float("nan")
        found.target_min, found.target_max = min(found.target_min, scalar(good.min())), max(found.target_max, scalar(good.max()))
        if good.numel() <= 65536:
            self._classes(found, good)
        found.mark("target_integers", True)
        if found.function in CLASSIFICATION and x.dim() >= 2 and x.shape[1] > 1 and x.shape[0] == y.shape[0]:
            hit = (x.argmax(1) == y) & kept
            return scalar(hit.sum()) / max(int(scalar(kept.sum())), 1)
        return float("nan")

    def _pad(self) -> int | None:
        """The one padding_idx of the embeddings alive, looked up a few times only."""
        if self._pad_looks < 4:
            self._pad_looks += 1
            found = {m.padding_idx for m in self.session.registry.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}
            self._pad_index = found.pop() if len(found) == 1 else None
        return self._pad_index

    @staticmethod
    def _classes(found: Criterion, values: torch.Tensor) -> None:
        if len(found.classes) < 1000:
            from osler.watch.readout import numbers
            for number in numbers(torch.unique(values)[:1000]):
                if number == int(number) if abs(number) < 1e9 else False:
                    found.classes.add(int(number))

    @quiet
    def finish(self) -> None:
        for found in self.known.values():
            if found.calls > 1:
                self.session.fact("criterion", found.at, **found.to_json())


def found_enough(phases: int) -> bool:
    """Under pressure, later validation phases are kept at doubling numbers only."""
    return bool(phases & (phases - 1))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
