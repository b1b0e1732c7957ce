"""The layout's promises: who imports whom, what works without torch, how long a file may be, and no drawer for odds and ends."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "osler"
FLOORS = {
    "core": 0,
    "measure": 1, "store": 1, "rules": 1,
    "readers": 2, "diagnose": 2, "probes": 2, "treatments": 2, "audit": 2,
    "watch": 3,
    "trials": 4, "report": 4,
    "web": 5, "integrations": 5,
    "cli": 6,
}
TOP = 7
"""Modules beside the folders (``__init__``, ``__main__``, ``sidecar``) may import everything."""
TORCH_FREE = ("core", "store", "rules", "readers", "diagnose", "report", "audit", "web", "cli")
WATCH_MAY_IMPORT = {"torch", "numpy", "osler"}
"""Inside the training process nothing else is loaded; scikit-learn and others are looked at only where the user imported them."""
HARD_LENGTH = 500
LONG_FILES: dict[str, int] = {}
"""Files that may be longer than ``HARD_LENGTH``, with their limit."""
NO_DRAWERS = ("utils", "util", "helpers", "helper", "common", "misc", "base", "manager")

FILES = sorted(SOURCE.rglob("*.py"))


def folder(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imported(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, absolute module name, and whether it happens when the file is imported (not inside a function, not for types)."""
    package = ["osler", *path.relative_to(SOURCE).parent.parts]

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = ".".join([*package[:len(package) - child.level + 1], child.module or ""]).strip(".") if child.level else child.module
                yield child.lineno, module or "", eager
                yield from ((child.lineno, f"{module}.{alias.name}", eager) for alias in child.names)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or typing_only
            yield from visit(child, eager and not lazy)

    yield from visit(ast.parse(path.read_text()), True)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    own = folder(path)
    assert not own or own in FLOORS, f"src/osler/{own} has no floor: give it one in DESIGN.md and here"
    floor = FLOORS.get(own, TOP)
    wrong = []
    for line, module, _eager in imported(path):
        parts = module.split(".")
        other = parts[1] if parts[0] == "osler" and len(parts) > 1 else own
        if other not in FLOORS or other == own:
            continue
        if FLOORS[other] >= floor:
            wrong.append(f"line {line}: {own} (floor {floor}) imports {other} (floor {FLOORS[other]})")
    assert not wrong, "\n".join(sorted(set(wrong)))


@pytest.mark.parametrize("path", [p for p in FILES if folder(p) in {"watch", "core"}], ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_watcher_brings_nothing_along(path: Path) -> None:
    foreign = sorted({f"line {line}: {module}" for line, module, eager in imported(path) if eager
                      and (top := module.split(".")[0]) not in sys.stdlib_module_names and top not in WATCH_MAY_IMPORT})
    assert not foreign, "\n".join(foreign)


def test_torch_free_folders_import_without_torch() -> None:
    modules = [".".join(["osler", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
               for path in FILES if folder(path) in TORCH_FREE or path.parent == SOURCE]
    program = f"""
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"torch", "torchvision", "functorch"}}:
            raise ImportError(f"{{name}} was imported")
sys.meta_path.insert(0, Wall())
import importlib
for name in {modules!r}:
    if name == "osler.__main__":
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {{"osler", "torch"}}:
            raise
    except ImportError as error:
        print(name, error, sep=": ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_length_and_name(path: Path) -> None:
    name = str(path.relative_to(SOURCE).as_posix())
    lines = len(path.read_text().splitlines())
    limit = LONG_FILES.get(name, HARD_LENGTH)
    assert lines <= limit, f"{name} has {lines} lines, the limit is {limit}: one concept a file"
    drawers = [part for part in Path(name).with_suffix("").parts if part in NO_DRAWERS]
    assert not drawers, f"{name}: say what is in it instead of {drawers[0]!r}"


def test_allow_list_is_needed() -> None:
    stale = [name for name, limit in LONG_FILES.items()
             if not (SOURCE / name).exists() or len((SOURCE / name).read_text().splitlines()) <= HARD_LENGTH or limit <= HARD_LENGTH]
    assert not stale, f"no longer longer than {HARD_LENGTH} lines: {stale}"
