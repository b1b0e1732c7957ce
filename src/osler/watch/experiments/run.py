"""All experiments on one capture, in order of worth; runs inside the forked copy."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any

from osler.watch.experiments.batch_mixing import batch_mixing
from osler.watch.experiments.capture import Capture
from osler.watch.experiments.causality import causality
from osler.watch.experiments.independence import input_independence
from osler.watch.experiments.items import item_repeat
from osler.watch.experiments.label_sources import label_dependence
from osler.watch.experiments.layout import Batch, Layout, Shift, find_layout, find_shift
from osler.watch.experiments.outliers import absurd_rows
from osler.watch.experiments.repeat import input_mutated, pass_repeat
from osler.watch.experiments.subject import Emit, Subject, Unclear
from osler.watch.experiments.tokens import token_shift

MAX_LOADERS = 4
Row = dict[str, Any]


def run(capture: Capture, emit: Emit, seconds: float = 5.0) -> None:
    """Hands every fact to ``emit`` as soon as it is known. Whatever an experiment raises becomes a fact of its own."""
    warnings.simplefilter("ignore")
    begin = perf_counter()
    subject = Subject(capture)
    subject.evaluating()
    woken = subject.wake()
    prepared = _prepare(subject)
    layout, batch, shift, why = prepared
    few = batch.inputs if batch is not None else {}
    random = False

    def attempt(name: str, experiment: Callable[[], Row | None]) -> Row | None:
        emit({"begin": name})
        started = perf_counter()
        try:
            row = experiment()
        except Unclear as reason:
            row = {"root": capture.root_id, "unclear": True, "why": str(reason), "at": None}
        except Exception as problem:
            row = {"failed": f"{type(problem).__name__}: {problem}"[:300] + _where(problem), "at": None}
        if row is not None:
            emit({"name": name, "seconds": round(perf_counter() - started, 4), **row})
        return row

    def need(experiment: Callable[[Layout, Batch], Row]) -> Callable[[], Row]:
        def ready() -> Row:
            if layout is None or batch is None:
                raise Unclear(why)
            return experiment(layout, batch)

        return ready

    def rows() -> Row | None:
        """Pairing of the training rows; what lies far out among them. The first emits by itself."""
        found = label_dependence(capture, emit)
        for part in found[:1]:
            if (row := absurd_rows(part)) is not None:
                emit({"name": "absurd-rows", "seconds": 0.0, "loader": capture.active, "at": None, **row})
        return None

    # A first pass that took long tells what the rest would take; the ones below count about ten more.
    if subject.seconds * 12 > seconds - (perf_counter() - begin):
        why, layout, batch = f"one pass takes {subject.seconds:.2f} s", None, None
    else:
        repeat = attempt("pass-repeat", lambda: pass_repeat(subject, few, "eval"))
        random = bool(repeat and not repeat.get("same"))
    attempt("batch-mixing", need(lambda known, some: batch_mixing(subject, known, some, random)))
    if shift is not None:
        attempt("causality", need(lambda known, some: causality(subject, known, some, shift)))
    attempt("input-independence", need(lambda known, some: input_independence(subject, known, some, woken)))
    attempt("token-shift", lambda: token_shift(capture))
    attempt("rows", rows)
    subject.training()
    if batch is not None:
        attempt("input-mutated", lambda: input_mutated(subject, few))
        attempt("pass-repeat", lambda: pass_repeat(subject, few, "train"))
    for index, loader in capture.loaders[:MAX_LOADERS]:
        attempt("item-repeat", lambda index=index, loader=loader: item_repeat(index, loader))  # type: ignore[misc]


def _prepare(subject: Subject) -> tuple[Layout | None, Batch | None, Shift | None, str]:
    """Layout, sub-batch and shift; where they cannot be had, the reason."""
    shift = None
    try:
        shift = find_shift(subject)
        layout = find_layout(subject, shift)
        return layout, Batch(subject, layout.axes, layout.n), shift, ""
    except Unclear as reason:
        return None, None, shift, str(reason)
    except Exception as problem:
        return None, None, shift, f"the pass could not be repeated ({type(problem).__name__}: {problem})"[:300]


def _where(problem: BaseException) -> str:
    last = traceback.extract_tb(problem.__traceback__)[-1:]
    return f" at {last[0].filename.rsplit('/', 1)[-1]}:{last[0].lineno}" if last else ""
