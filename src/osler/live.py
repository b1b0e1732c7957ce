"""Watching from inside a program: ``osler.watch(model, optimizer)`` and ``osler.log(name=value)``.

Same taps as ``osler run``. The engine runs beside the training as a process of its own (``python -m osler.sidecar``), which
prints the verdict on stderr when the watch is closed or the program ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from osler.core.errors import MissingExtra, UsageError


class Watch:
    """Handle of a running watch; also a context manager.

    Attributes:
        directory: the run's folder; ``osler report`` reads it at any time.
    """

    def __init__(self, directory: Path, session: Any, sidecar: subprocess.Popen[bytes] | None) -> None:
        self.directory = directory
        self._session = session
        self._sidecar = sidecar
        self._open = True

    def close(self, timeout: float = 30.0) -> None:
        """End the watch and wait for the verdict. Calling it twice does nothing."""
        if not self._open:
            return
        self._open = False
        if self._sidecar is None:
            return
        self._session.finish()
        try:
            self._sidecar.wait(timeout)
        except subprocess.TimeoutExpired:
            pass

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def watch(model: Any = None, *optimizers: Any, directory: str | Path | None = None, budget: float = 0.02, quiet: bool = False) -> Watch:
    """Watch the training of this process from here on.

    Args:
        model: a ``torch.nn.Module`` that already exists (modules built later are seen by themselves).
        optimizers: optimizers that already exist.
        directory: where runs are kept (default: environment variable OSLER_DIR, else ``osler-runs`` in the working directory).
        budget: share of step time osler may spend, 0 < budget <= 0.5.
        quiet: no verdict on stderr; read it with ``osler report``.

    Returns:
        a handle; under ``osler run`` it belongs to the run that is being watched already.

    Raises:
        MissingExtra: torch is not installed.
        UsageError: the model or an optimizer is of another kind, or the budget is out of range.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "torch") from None
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"osler.watch expects a torch.nn.Module first, got {type(model).__name__}")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"osler.watch expects torch optimizers after the model, got {type(optimizer).__name__}")
    if not 0 < budget <= 0.5:
        raise UsageError(f"budget is a share of step time between 0 and 0.5, got {budget}")

    from osler.store import runs
    from osler.store.writer import write_json
    from osler.watch.install import install, installed

    session = installed()
    sidecar = None
    if session is None or (session.finished and not os.environ.get("OSLER_RUN")):
        root = Path(directory) if directory is not None else runs.default_root(Path.cwd())
        name = Path(sys.argv[0]).stem or "notebook"
        place = runs.new_run(root, name)
        write_json(place / "run.json", {"schema": 1, "id": place.name, "name": name, "command": list(sys.argv), "cwd": os.getcwd(), "budget": budget,
                                        "started": time.strftime("%Y-%m-%dT%H:%M:%S"), "host": socket.gethostname(), "pid": os.getpid()})
        if session is None:
            session = install(place, budget)
        else:
            session.again(place)
        assert session is not None
        command = [sys.executable, "-m", "osler.sidecar", str(place), str(os.getpid())] + (["--quiet"] if quiet else [])
        sidecar = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    for module in model.modules() if model is not None else ():
        if session.registry.built_at(module) is None:
            session.registry.built(module, None)
    for optimizer in optimizers:
        session.adopt(optimizer)
    return Watch(session.directory, session, sidecar)


def log(**values: float) -> None:
    """Record named numbers beside the run (a metric of your own, a validation loss made by hand).

    A tensor of one element is accepted on the CPU; anything on a device is left out, so that nothing waits.
    Does nothing when no watch is running.
    """
    from osler.watch.install import installed

    session = installed()
    if session is None:
        return
    from osler.watch.readout import scalar
    session.fact("log", None, values={name: scalar(value) for name, value in values.items()})
