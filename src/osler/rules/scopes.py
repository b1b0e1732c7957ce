"""Walks over statements: a scope without what is nested in it, all nodes with their function and class, lists that are appended to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.rules import script

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function or class body; nested functions are left out (in a class, its methods are not)."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda) or isinstance(scope, ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def appended(statement: ast.stmt) -> set[str]:
    """The list that a statement appends to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    name = script.dotted(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append" else None
    return {name} if name is not None else set()


def constant_value(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant | ast.List | ast.UnaryOp)


def scoped(module: ast.Module) -> Iterator[tuple[ast.AST, Scope, ast.ClassDef | None]]:
    """All nodes with the function and the class around them."""
    stack: list[tuple[ast.AST, Scope, ast.ClassDef | None]] = [(module, module, None)]
    while stack:
        node, scope, owner = stack.pop()
        for child in ast.iter_child_nodes(node):
            yield child, scope, owner
            inner: Scope = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else scope
            stack.append((child, inner, child if isinstance(child, ast.ClassDef) else owner))
