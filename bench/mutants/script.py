"""Mutation operators: one small fault each, edited into the source of a healthy script.

An operator is a function from a ``Script`` to mutants. It edits text at positions that the syntax tree gives, so that everything
else stays as its author wrote it. The kinds follow DeepCrime (Humbatova et al., ISSTA 2021), extended by what its Keras subjects
cannot express: the order of calls in the loop, registration, masks and axes, clipping, precision.

Each mutant names the causes that are right for it: the first is the fault itself, the others are declared equivalents, the same
change seen from another side (a loss summed instead of averaged *is* a learning rate that is too high).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")
LOSSES = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")
LOSS_CLASSES = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss")


@dataclass(frozen=True, slots=True)
class Mutant:
    operator: str
    variant: str
    source: str
    lines: tuple[int, ...]
    causes: tuple[str, ...]


class Script:
    """Source of a healthy script, its tree, and the questions that operators ask about it."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    # -- looking -----------------------------------------------------------------------------------------------

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls whose last name is one of ``names``, in order of the text."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and last_name(n.func) in names]
        return sorted(found, key=lambda n: (n.lineno, n.col_offset))

    def statements(self, method: str, receiver: str = "") -> list[ast.Expr]:
        """Statements that only call ``….method(…)`` on something whose name matches ``receiver``."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and isinstance(n.value.func, ast.Attribute)
                and n.value.func.attr == method and re.search(receiver, self.of(n.value.func.value))]

    def steps(self) -> list[ast.Expr]:
        return [s for s in self.statements("step") if "sched" not in self.of(s)]

    def assigned(self, name: str) -> list[ast.Assign]:
        """Assignments at module level to ``name`` (also within a tuple)."""
        return [n for n in self.tree.body if isinstance(n, ast.Assign) and name in [t.id for t in ast.walk(n.targets[0]) if isinstance(t, ast.Name)]]

    def classification(self) -> bool:
        return "cross_entropy(" in self.text or "CrossEntropyLoss" in self.text

    def model(self) -> ast.Assign | None:
        """The statement that builds the model that is trained."""
        for name in ("model", "net"):
            if found := self.assigned(name):
                return found[0]
        return None

    def optimizer(self) -> ast.Call | None:
        return next(iter(self.calls(*OPTIMIZERS)), None)

    def loss_calls(self) -> list[ast.Call]:
        """Calls of the criterion that a backward follows: ``loss = criterion(…)``."""
        names = {t.id for n in ast.walk(self.tree) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and last_name(n.value.func) in LOSS_CLASSES
                 for t in n.targets if isinstance(t, ast.Name)}
        names |= {t.attr for n in ast.walk(self.tree) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and last_name(n.value.func) in LOSS_CLASSES
                  for t in n.targets if isinstance(t, ast.Attribute)}
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "loss" and isinstance(node.value, ast.Call) \
                    and (last_name(node.value.func) in LOSSES or last_name(node.value.func) in names):
                found.append(node.value)
        return found

    def data(self, which: str) -> ast.Assign | None:
        """The last statement at module level that sets ``x_train``, ``y_train`` …, before the model is built."""
        model = self.model()
        found = [n for n in self.assigned(which) if model is None or n.lineno < model.lineno or model is None]
        return found[-1] if found else None

    def of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    # -- editing -----------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        def at(line: int, column: int) -> int:
            return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def replaced(self, *edits: tuple[ast.AST, str]) -> str:
        text = self.text
        for node, new in sorted(edits, key=lambda edit: -self.span(edit[0])[0]):
            start, end = self.span(node)
            text = text[:start] + new + text[end:]
        ast.parse(text)
        return text

    def after(self, statement: ast.stmt, *new: str) -> str:
        """New statements behind ``statement``, at its indentation."""
        indent = " " * statement.col_offset
        end = self.starts[statement.end_lineno or statement.lineno]
        text = self.text[:end] + "".join(f"{indent}{line}\n" for line in new) + self.text[end:]
        ast.parse(text)
        return text


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((k for k in call.keywords if k.arg == name), None)


def with_keyword(script: Script, call: ast.Call, name: str, value: str) -> str:
    """The source with this keyword of the call set."""
    old = keyword(call, name)
    if old is not None:
        return script.replaced((old.value, value))
    whole = script.of(call)
    return script.replaced((call, f"{whole[:-1].rstrip().rstrip(',')}{', ' if call.args or call.keywords else ''}{name}={value})"))


Operator = Callable[[Script], Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]]
OPERATORS: dict[str, Operator] = {}


def operator(function: Operator) -> Operator:
    OPERATORS[function.__name__.replace("_", "-")] = function
    return function


def mutants(script: Script) -> list[Mutant]:
    found = []
    for name, function in OPERATORS.items():
        for variant, source, lines, causes in function(script):
            if source != script.text:
                found.append(Mutant(name, variant, source, lines, causes))
    return found
