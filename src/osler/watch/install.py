"""Patch torch, once, in this process. Called at the end of torch's import by the attach hook, or by ``osler.watch``."""

from __future__ import annotations

import dis
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from osler.core.facts import Location
from osler.watch.session import Session

_installed: list[Any] = []
"""The one session of this process; a second call to ``install`` returns it."""


def installed() -> Session | None:
    """The session of this process, if the taps are in place."""
    return _installed[0] if _installed else None


def install(directory: Path | None = None, budget: float | None = None) -> Session | None:
    """Install all taps.

    Args:
        directory: run directory (default: environment variable OSLER_RUN).
        budget: share of step time that may be spent (default: OSLER_BUDGET or 0.02).

    Returns:
        the session, or ``None`` when no run directory is known.
    """
    if _installed:
        return _installed[0]  # type: ignore[no-any-return]
    place = directory or (Path(os.environ["OSLER_RUN"]) if os.environ.get("OSLER_RUN") else None)
    if place is None:
        return None
    share = budget if budget is not None else float(os.environ.get("OSLER_BUDGET") or 0.02)
    session = Session(place, share, os.environ.get("OSLER_GUARD") == "1")
    _installed.append(session)

    from osler.watch.compiler import hide
    from osler.watch.courier import Courier
    from osler.watch.criteria import Criteria
    from osler.watch.growth import Growth
    from osler.watch.modules import ModuleHooks
    from osler.watch.observe import Observer
    from osler.watch.stacks import Stacks
    from osler.watch.taps import (
        backward,
        checkpoints,
        clipping,
        criterion,
        distributed,
        estimators,
        loader,
        loop,
        modules,
        phase,
        rows,
        scaling,
        schedulers,
        steps,
        tools,
    )
    from osler.watch.trace import Tracer

    session.courier = Courier()
    tracer = Tracer(session)
    hooks = ModuleHooks(session)
    observer = Observer(session, tracer, hooks)
    training = loop.Training(session, tracer, hooks, observer)
    observer.stop_trace = training.stop_trace
    session.adopt = training.adopt
    criteria = Criteria(session, observer)
    training.backwards.criteria = criteria
    loaders = loader.Loaders(session, observer, training)
    helpers = tools.Tools(session, observer, training)
    states = checkpoints.Checkpoints(session)
    growth, stacks = Growth(session), Stacks(session)
    rows.RowTables(session, observer, training)
    session.looks += [stacks.start, growth.look, stacks.tell]
    loaders.passed = growth.passed
    training.backwards.before_snapshot = states.still_there
    parts = ((modules.install, (session, observer)), (checkpoints.install, (session, states)), (steps.install, (training,)), (backward.install, (session, training.backwards)),
             (criterion.install, (session, criteria, training.lane)), (phase.install, (session, observer)), (loader.install, (session, loaders)),
             (tools.install, (session, helpers)), (schedulers.install, (session, schedulers.Schedules(session, training))),
             (clipping.install, (session, clipping.Clips(session, observer, training))), (scaling.install, (session, scaling.Scaling(session, observer, training))),
             (estimators.install, (session, estimators.Estimators(session))),
             (distributed.install, (session, distributed.Ranks(session, training, hooks), _record, cleaned)))
    for part, args in parts:
        try:
            part(*args)
        except Exception:
            session.guard.failed(part.__module__)
    hide()
    _exceptions(session)
    return session


def _exceptions(session: Session) -> None:
    """Record an unhandled exception, take our frames out of its traceback, and let the hook that was there print it."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        session.interrupted = session.interrupted or kind is KeyboardInterrupt
        try:
            trace = cleaned(trace)
            value.__traceback__ = trace
            _record(session, kind, value, trace)
        except Exception:
            session.guard.failed("exception")
        original(kind, value, trace)

    sys.excepthook = excepthook


def cleaned(trace: TracebackType | None) -> TracebackType | None:
    """The traceback as it would be without osler."""
    return without_hook_frames(without_own_frames(trace, os.path.dirname(os.path.abspath(__file__)) + os.sep))


def without_own_frames(trace: TracebackType | None, own: str) -> TracebackType | None:
    """The traceback without frames of files below ``own`` (experiments' user code keeps its frames)."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((own, "<osler")):
        trace = trace.tb_next
    here = trace
    while here is not None and here.tb_next is not None:
        if here.tb_next.tb_frame.f_code.co_filename.startswith((own, "<osler")):
            here.tb_next = here.tb_next.tb_next
        else:
            here = here.tb_next
    return trace


def without_hook_frames(trace: TracebackType | None) -> TracebackType | None:
    """Module calls as they look without hooks: while one of ours is attached, torch goes through an inner function."""
    here, before = trace, None
    while here is not None and here.tb_next is not None:
        code, inner = here.tb_frame.f_code, here.tb_next.tb_frame.f_code
        module = here.tb_frame.f_locals.get("self")
        plain = inner.co_name == "inner" and code.co_name == "_call_impl" and inner.co_filename == code.co_filename
        if plain and not (getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
                          or getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None)):
            call = next((i for i in dis.get_instructions(code) if i.opname == "CALL_FUNCTION_EX"), None)
            line = getattr(getattr(call, "positions", None), "lineno", None)  # from Python 3.11 on
            if call is not None and line is not None:
                shown = TracebackType(here.tb_next.tb_next, here.tb_frame, call.offset, line)
                if before is None:
                    trace = shown
                else:
                    before.tb_next = shown
                here = shown
        before, here = here, here.tb_next
    return trace


def _record(session: Session, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    from osler.watch.where import is_user, shorten
    user: list[Any] = []
    library: list[Any] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        place = Location(shorten(code.co_filename), trace.tb_lineno, code.co_name)
        (user if is_user(code) else library).append(place)
        trace = trace.tb_next
    at = user[-1] if user else None
    session.fact("exception", at, type=kind.__name__, message=str(value)[:500], frames=[p.to_json() for p in reversed(user)][:20],
                 lib_frames=[p.to_json() for p in reversed(library)][:20], in_backward=any(p.function == "backward" for p in library))
