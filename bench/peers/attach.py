"""Runs a script with a peer attached as its README says, in the peer's own environment: ``attach.py PEER OUT train.py``.

The peers want a line or two in the training loop. Here those lines are called from hooks instead: the peer gets the model that holds
the first optimizer's parameters, that optimizer, and the loss that ``backward`` started from. What it found goes to OUT as JSON: ``[{"id", "title", "level"}]``.
``log`` is no peer: it writes the log (step, loss, lr, gradient norm) that the readers of logs are given.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Loop:
    """What the hooks know: the first optimizer that steps, its model, and the newest loss."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None
        self.loss = float("nan")
        self.step = 0

    def model(self) -> torch.nn.Module | None:
        """The largest module that holds the optimizer's parameters."""
        assert self.optimizer is not None
        wanted = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = [m for m in gc.get_objects() if isinstance(m, torch.nn.Module) and any(id(p) in wanted for p in m.parameters())]
        return max(found, key=lambda m: sum(1 for _ in m.modules()), default=None)


def torch_audit(loop: Loop) -> tuple[Callable[[], None], Callable[[], list[dict[str, str]]]]:
    from torch_audit import autopatch

    state: dict[str, Any] = {}

    def before() -> None:
        if "auditor" not in state:
            state["auditor"] = autopatch(loop.model(), optimizer=loop.optimizer, every_n_steps=10, reporters=[], fail_level="ERROR", run_static=True, run_init=True)

    def finish() -> list[dict[str, str]]:
        result = state["auditor"].finish(report=False)
        return [{"id": f.rule_id, "title": f.message[:200], "level": getattr(f.severity, "name", str(f.severity))} for f in result.findings]

    return before, finish


def torchmortem(loop: Loop) -> tuple[Callable[[], None], Callable[[], list[dict[str, str]]]]:
    from torchmortem import Autopsy

    state: dict[str, Any] = {}

    def before() -> None:
        if "autopsy" not in state:
            state["autopsy"] = Autopsy(loop.model(), optimizer=loop.optimizer)
            state["autopsy"].__enter__()
        elif loop.step:
            state["autopsy"].step(loss=loop.loss)

    def finish() -> list[dict[str, str]]:
        state["autopsy"].__exit__(None, None, None)
        report = state["autopsy"].get_report()
        return [{"id": f.title.split(" in ")[0], "title": f.title, "level": getattr(f.severity, "name", str(f.severity))} for f in report.findings]

    return before, finish


def log(loop: Loop) -> tuple[Callable[[], None], Callable[[], list[dict[str, str]]]]:
    rows = ["step,loss,lr,grad_norm"]

    def before() -> None:
        assert loop.optimizer is not None
        grads = [p.grad for group in loop.optimizer.param_groups for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        norm = float(torch.stack([g.detach().float().norm() for g in grads]).norm()) if grads else 0.0
        rows.append(f"{loop.step + 1},{loop.loss},{float(loop.optimizer.param_groups[0]['lr'])},{norm}")

    def finish() -> list[dict[str, str]]:
        Path(sys.argv[0]).resolve().parent.joinpath("peer-log.csv").write_text("\n".join(rows) + "\n")
        return []

    return before, finish


def training_doctor(path: Path) -> list[dict[str, str]]:
    from training_doctor import Doctor

    return [{"id": d.problem, "title": d.problem, "level": d.severity.name} for d in Doctor().load(path).analyze()]


PEERS = {"torch-audit": torch_audit, "torchmortem": torchmortem, "log": log}


def main() -> None:
    peer, out, script = sys.argv[1:4]
    if peer == "training-doctor":
        Path(out).write_text(json.dumps(training_doctor(Path(script))))
        return
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    loop = Loop()
    before, finish = PEERS[peer](loop)
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        root = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        loop.loss = float(root.detach()) if root.numel() == 1 else float("nan")
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    trouble: list[str] = []

    def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if loop.optimizer is None:
            loop.optimizer = optimizer
        if optimizer is loop.optimizer and not trouble:
            try:
                before()
            except Exception as error:
                trouble.append(f"{type(error).__name__}: {error}"[:200])

    def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        loop.step += optimizer is loop.optimizer

    register_optimizer_step_pre_hook(pre)
    register_optimizer_step_post_hook(post)
    crash = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
    except BaseException as error:
        crash = f"{type(error).__name__}: {error}"[:200]
    found: list[dict[str, str]] = []
    if loop.optimizer is not None:
        try:
            found = finish()
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}"[:200])
    Path(out).write_text(json.dumps({"findings": found, "steps": loop.step, "crash": crash, "trouble": trouble}))


if __name__ == "__main__":
    main()
