"""No host–device synchronisation in the hot path: by source, by counting on tensors without data, and on a GPU where there is one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from side_by_side import ROOT, WATCH, environment, own_failures, recorded, run

WATCH_SOURCE = ROOT / "src" / "osler" / "watch"
ALLOWED = {
    "readout.py": "the one marked place: CPU tensors only",
    "install.py": "runs once, before training",
}
ALLOWED_FOLDERS = {"experiments": "runs in a forked child, CPU only", "site": "runs before torch is there"}
MARK = "# host:"
"""A line with this comment holds host values (Python or numpy), never a tensor; the comment says which."""

METHODS = {"item", "tolist", "numpy", "cpu", "nonzero"}
FUNCTIONS = {("torch", "equal"), ("torch", "nonzero"), ("torch", "allclose"), ("torch", "is_nonzero")}
REDUCTIONS = {"sum", "mean", "norm", "max", "min", "amax", "amin", "abs", "any", "all", "std", "var", "count_nonzero", "detach",
              "isfinite", "isnan", "argmax", "prod"}


def hot_path() -> Iterator[Path]:
    for path in sorted([*WATCH_SOURCE.rglob("*.py"), *(ROOT / "src" / "osler" / "measure").rglob("*.py")]):
        if path.name not in ALLOWED and not ALLOWED_FOLDERS.keys() & set(path.parts):
            yield path


def synchronising(source: str) -> list[tuple[int, str]]:
    """Line and text of every call that would make the host wait for a device."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or MARK in lines[node.lineno - 1] or MARK in lines[(node.end_lineno or node.lineno) - 1]:
            continue
        called = node.func
        if isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            bad = (owner, called.attr) in FUNCTIONS or (called.attr in METHODS and owner not in {"np", "numpy"})
        else:
            first = node.args[0] if node.args else None
            bad = (isinstance(called, ast.Name) and called.id in {"float", "int", "bool"} and isinstance(first, ast.Call)
                   and isinstance(first.func, ast.Attribute) and first.func.attr in REDUCTIONS)
        if bad:
            found.append((node.lineno, ast.unparse(node)[:100]))
    return found


@pytest.mark.parametrize("path", list(hot_path()), ids=lambda p: str(p.relative_to(ROOT / "src" / "osler")))
def test_no_synchronising_call(path: Path) -> None:
    found = synchronising(path.read_text())
    assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in found)


def test_the_check_finds_them() -> None:
    bad = ["x.item()", "x.tolist()", "x.detach().cpu().numpy()", "m.nonzero()", "torch.equal(a, b)", "float(x.norm())", "bool(x.any())"]
    assert all(synchronising(line) for line in bad)
    assert not any(synchronising(line) for line in ("x.items()", "float(seconds)", "np.nonzero(a)", "float(a.sum())  # host: numpy"))


def test_nothing_is_read_from_tensors_off_the_cpu(scripts: Path, runs: Path) -> None:
    """On ``meta`` every read fails, is caught by the guard and shows up here; PyTorch's own are counted alone and watched."""
    outcomes = [run([*prefix, "meta_device.py"], scripts, environment(runs))
                for prefix in ([WATCH[0]], list(WATCH))]
    assert outcomes[0].code == outcomes[1].code == 0, outcomes[1].stderr.decode()
    assert outcomes[0].stdout == outcomes[1].stdout
    assert recorded(runs), "nothing was recorded, so this test showed nothing"
    assert not own_failures(runs)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


GPU_SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
criterion = nn.CrossEntropyLoss()
x, y = torch.randn(128, 64, device="cuda"), torch.randint(0, 10, (128,), device="cuda")
criterion(model(x), y).backward()
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
for step in range(300):
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        model.eval()
        with torch.no_grad():
            criterion(model(x), y)
        model.train()
torch.cuda.set_sync_debug_mode("default")
print(repr(loss.item()))
"""


def test_no_synchronisation_on_a_gpu(tmp_path: Path, runs: Path, osler_runs: None) -> None:
    if not has_cuda():
        pytest.skip("no CUDA device")
    (tmp_path / "train.py").write_text(GPU_SCRIPT)
    alone, watched = (run([*prefix, "train.py"], tmp_path, environment(runs)) for prefix in ([WATCH[0]], list(WATCH)))
    assert alone.code == 0, alone.stderr.decode()
    assert watched.code == 0, watched.stderr.decode()
    assert alone.stdout == watched.stdout
    assert not own_failures(runs)
