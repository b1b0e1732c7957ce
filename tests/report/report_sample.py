"""Windows built by hand for the views: a run with a fault, a healthy one, one that ends in NaN."""

from __future__ import annotations

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.signals import STREAMS
from osler.core.window import End, Window
from osler.diagnose import causes
from osler.diagnose.engine import Verdict, overhead
from osler.diagnose.rank import rank

CWD = "/home/ada/digits"
SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

from data import train_set, val_set

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
loader = DataLoader(train_set, batch_size=32, shuffle=True)
val_loader = DataLoader(val_set, batch_size=256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(10):
    model.train()
    for images, labels in loader:
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {correct / len(val_set):.3f}")
"""
RUN = {"id": "2026-10-05T14-02-11-train", "command": ["python", f"{CWD}/train.py"], "cwd": CWD, "budget": 0.02,
       "started": "2026-10-05T14:02:11+02:00", "torch": "2.13.0", "python": "3.11.9", "startup_s": 0.12}


def steps(n: int, loss: np.ndarray, grad: np.ndarray, lr: float = 0.1) -> np.ndarray:
    rows = np.zeros(n, STREAMS["steps"].dtype)
    rows["step"] = np.arange(1, n + 1)
    rows["t"] = np.arange(1, n + 1) * 0.027
    rows["backwards"] = 1
    rows["loss"], rows["grad_norm"], rows["lr"] = loss, grad, lr
    rows["step_time"], rows["own_time"], rows["data_wait"] = 0.027, 0.00036, 0.004
    rows["own_time"][:3] = 0.05
    return rows


def validation(n: int, every: int, values: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(values), STREAMS["calls"].dtype)
    rows["step"] = np.arange(1, len(values) + 1) * every
    rows["phase"], rows["batch"], rows["value"], rows["accuracy"] = 1, 256, values, np.clip(1 - values / 8, 0, 1)
    return rows


def layers(n: int) -> np.ndarray:
    rows = np.zeros(4 * n, STREAMS["layers"].dtype)
    rows["step"] = np.repeat(np.arange(1, n + 1), 4)
    rows["param"] = np.tile(np.arange(4), n)
    rows["grad_norm"] = np.tile([12.0, 3.0, 480.0, 35.0], n)
    return rows


FACTS = [
    Fact("attached", 0, 0.0, None, {"torch": "2.13.0", "python": "3.11.9", "main": f"{CWD}/train.py", "argv": ["train.py"]}),
    Fact("params", 0, 0.1, None, {"params": [{"uid": i, "name": name} for i, name in enumerate(
        ("0.weight", "0.bias", "2.weight", "2.bias"))]}),
    Fact("compile", 0, 0.2, Location(f"{CWD}/train.py", 8), {"what": "torch.jit.script"}),
]

FINDINGS = (
    Finding("grad-not-cleared", "certain", "harmful", "449 of 450 steps added to the gradients of the step before",
            "Call `optimizer.zero_grad()` before `loss.backward()`", Where(f"{CWD}/train.py", 18, also=(f"{CWD}/train.py:19",)), 1, 450,
            (Evidence("449 of 450 steps started from gradients that were not cleared", "cycle", 449, 1, 450),
             Evidence("the gradient norm grew 310-fold, from 2.1 at step 1 to 651 at step 450", "steps/grad_norm", 651.0, 21.0, 450)),
            "zero-grad"),
    Finding("exploding-gradients", "measured", "harmful", "the gradient norm of 2.weight grew 310-fold in 450 steps",
            "Clip gradients, or lower the learning rate", Where(module="2", parameter="2.weight"), 40, 450,
            (Evidence("median gradient norm 480 in 2.weight, 12 in 0.weight", "layers/grad_norm", 480.0, 100.0, 450),)),
    Finding("loss-diverged", "measured", "fatal", "the training loss rose from 0.9 to 24 after step 60", "", Where(), 60, 450,
            (Evidence("training loss 24 at step 450", "steps/loss", 24.0, 2.3, 450),)),
    Finding("eval-mode-missing", "certain", "harmful", "validation ran with 2 dropout layers active in 10 of 10 passes",
            "Call `model.eval()` before the validation loop", Where(f"{CWD}/train.py", 23), 45, 450,
            (Evidence("dropout was active in 10 of 10 validation passes", "phase", 1.0, 0.0, 10),), "eval-mode"),
    Finding("no-workers", "measured", "wasteful", "15 % of the step time is spent waiting for the loader",
            "Give the loader `num_workers=2`", Where(f"{CWD}/train.py", 9), 1, 450,
            (Evidence("4.0 of 27 ms per step", "steps/data_wait", 0.15, 0.1, 450),), "workers"),
    Finding("nondeterminism", "certain", "note", "the shuffle order is not seeded", "Pass a seeded `generator` to the loader",
            Where(f"{CWD}/train.py", 9)),
)
NOT_CHECKED = (
    NotChecked("compiled regions", "the inside of what torch.jit.script compiled cannot be seen"),
    NotChecked("amp-unscale-missing", "no gradient scaler was used"), NotChecked("amp-scaler-not-updated", "no gradient scaler was used"),
    NotChecked("ddp-no-sampler", "one process only"), NotChecked("ddp-set-epoch-missing", "one process only"),
    NotChecked("ddp-params-unsynced", "one process only"),
)
CHECKED = tuple(f"cause-{i}" for i in range(74))


def faulty() -> tuple[Window, Verdict]:
    rng = np.random.default_rng(0)
    t = np.arange(450)
    loss = np.where(t < 60, 2.3 * np.exp(-t / 40) + 0.3, 0.9 * np.exp((t - 60) / 120)) * np.exp(rng.normal(0, 0.12, 450))
    loss[300] = 90.0
    grad = 2.1 * np.exp(t / 78) * np.exp(rng.normal(0, 0.15, 450))
    window = Window(RUN, {"steps": steps(450, loss, grad), "calls": validation(450, 45, loss[44::45] * 1.1), "layers": layers(450)},
                    FACTS, (), {f"{CWD}/train.py": SCRIPT}, End(0, seconds=12.3))
    return window, Verdict(tuple(rank(causes.fold(FINDINGS))), NOT_CHECKED, (), overhead(window), CHECKED)


def healthy() -> tuple[Window, Verdict]:
    rng = np.random.default_rng(1)
    t = np.arange(450)
    loss = (2.2 * np.exp(-t / 60) + 0.08) * np.exp(rng.normal(0, 0.1, 450))
    window = Window(RUN, {"steps": steps(450, loss, 2.0 * np.exp(-t / 300) * np.exp(rng.normal(0, 0.2, 450))),
                          "calls": validation(450, 45, loss[44::45] * 1.15)}, FACTS[:2], (), {f"{CWD}/train.py": SCRIPT}, End(0, seconds=12.3))
    return window, Verdict((), NOT_CHECKED[1:], (), overhead(window), CHECKED)


def broken() -> tuple[Window, Verdict]:
    """Ends in NaN, with figures that JSON cannot hold."""
    loss = np.linspace(2.3, 0.4, 120)
    loss[97:] = np.nan
    window = Window(RUN, {"steps": steps(120, loss, np.where(np.isnan(loss), np.nan, 1.5))},
                    (*FACTS[:2], Fact("nonfinite", 97, 3.0, None, {"what": "loss"})), (),
                    {f"{CWD}/train.py": SCRIPT}, End(1, seconds=3.0))
    findings = (
        Finding("log-of-zero", "certain", "fatal", "`log` got 3 zeros at step 98 and the loss became inf", "Use `log_softmax`, or `clamp` the input",
                Where(f"{CWD}/train.py", 17, module="head"), 98, 98,
                (Evidence("3 of 320 operands were 0", "nonfinite", float("inf"), None, 320),)),
        Finding("loss-nan", "certain", "fatal", "the loss is NaN from step 98 on", "", Where(), 98, 120,
                (Evidence("first NaN at step 98", "steps/loss", float("nan"), None, 23),)))
    return window, Verdict(tuple(rank(causes.fold(findings))), (), (), overhead(window), CHECKED)
