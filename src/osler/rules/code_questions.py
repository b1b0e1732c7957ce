"""Questions that rules ask of the user's source text: what a line says, what it assigns, what encloses it.

Everything answers ``None`` or an empty list when the source was not kept or does not parse.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from osler.core.facts import Location
from osler.core.window import Window

SHOWN = 100


def spot(raw: Any) -> Location | None:
    """A location field of a fact: ``[file, line, function]`` or nothing."""
    return raw if isinstance(raw, Location) else Location.from_json(raw)


@lru_cache(maxsize=64)
def parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def tree(window: Window, file: str) -> ast.Module | None:
    text = window.sources.get(file)
    return parsed(text) if text else None


def code(window: Window, at: Location | None) -> str:
    """The source line without indentation and comment noise, shortened to fit a sentence."""
    text = window.line(at.file, at.line).strip() if at is not None else ""
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def quoted(window: Window, at: Location | None, default: str) -> str:
    """The source line in backquotes, or ``default`` when the source was not kept."""
    text = code(window, at)
    return f"`{text}`" if text else default


def covers(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or -1)


def statement(window: Window, at: Location | None) -> ast.stmt | None:
    """The innermost statement that covers the line; of a compound statement only its header counts as covered last."""
    root = tree(window, at.file) if at is not None else None
    if root is None or at is None:
        return None
    found: ast.stmt | None = None
    for node in ast.walk(root):
        if isinstance(node, ast.stmt) and covers(node, at.line) and (found is None or node.lineno >= found.lineno):
            found = node
    return found


def assigned(window: Window, at: Location | None) -> str | None:
    """What the statement at a line assigns to, as written: ``self.blocks``, ``optimizer``."""
    node = statement(window, at)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return ast.unparse(node.target)
    return None


def calls_at(window: Window, at: Location | None) -> list[ast.Call]:
    """Calls that begin on, or span, the line."""
    node = statement(window, at)
    if node is None or at is None:
        return []
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and covers(n, at.line)]


def dotted(node: ast.AST) -> str:
    """``nn.Dropout`` for a name or attribute chain, the last attribute for anything else, else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def nodes(window: Window, want: Callable[[ast.AST], bool]) -> list[tuple[Location, ast.AST]]:
    """All nodes of the user's files that satisfy ``want``, with their line, in file order."""
    found = []
    for file in window.sources:
        root = tree(window, file)
        for node in ast.walk(root) if root is not None else ():
            if hasattr(node, "lineno") and want(node):
                found.append((Location(file, int(node.lineno)), node))
    return sorted(found, key=lambda pair: (pair[0].file, pair[0].line))


def constructions(window: Window, name: str) -> list[Location]:
    """Lines where a class of that name is called."""
    return [at for at, node in nodes(window, lambda n: isinstance(n, ast.Call) and dotted(n.func).split(".")[-1] == name)]


def enclosing(window: Window, at: Location | None, kinds: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Nodes of the given kinds around a line, innermost first."""
    root = tree(window, at.file) if at is not None else None
    if root is None or at is None:
        return iter(())
    around = [n for n in ast.walk(root) if isinstance(n, kinds) and covers(n, at.line)]
    return iter(sorted(around, key=lambda n: -int(getattr(n, "lineno", 0))))


NO_GRAD = ("no_grad", "inference_mode", "set_grad_enabled")


def grad_switch(window: Window, at: Location | None) -> Location | None:
    """The ``with torch.no_grad():`` or decorator that switches gradients off around a line."""
    for node in enclosing(window, at, (ast.With, ast.FunctionDef)):
        inside = [item.context_expr for item in node.items] if isinstance(node, ast.With) else node.decorator_list  # type: ignore[attr-defined]
        for item in inside:
            if any(dotted(n).split(".")[-1] in NO_GRAD for n in ast.walk(item)):
                return Location(at.file, item.lineno) if at is not None else None
    return None


def freezing_lines(window: Window) -> list[Location]:
    """Lines that set ``requires_grad = False`` or call ``requires_grad_(False)``."""

    def freezes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return (any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
                    and not (isinstance(node.value, ast.Constant) and node.value.value is True))
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "requires_grad_":
            given: list[ast.expr] = [*node.args, *(k.value for k in node.keywords)]
            return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is True)
        return False

    return [at for at, _ in nodes(window, freezes)]


def attribute_line(window: Window, name: str) -> Location | None:
    """The line that assigns ``self.<name>``."""

    def assigns(node: ast.AST) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
        return any(isinstance(t, ast.Attribute) and t.attr == name and dotted(t.value) == "self" for t in flat)

    found = nodes(window, assigns)
    return found[0][0] if found else None
