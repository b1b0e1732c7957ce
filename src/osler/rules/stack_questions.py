"""Questions to the fact ``time``: where the wall time went, by user line, and whether that line belongs to every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from osler.core.facts import Fact, Location
from osler.core.window import Window
from osler.rules.script import (
    FUNCTIONS,
    LOOPS,
    Loop,
    around,
    below_function,
    call_name,
    calls,
    parse,
    training_functions,
    trains,
)

BY_FRAMEWORK = frozenset(("training_step", "on_train_batch_end", "on_train_batch_start", "on_before_optimizer_step", "on_after_backward", "on_before_zero_grad",
                          "compute_loss", "on_step_end"))
"""Methods that a framework calls at every training step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of stack. ``stack`` holds user lines, innermost first; ``seconds`` of wall time, ``cpu`` of work (on Linux with the time spent waiting for a processor)."""

    stack: tuple[Location, ...]
    kind: str | None
    via: str
    leaf: str
    seconds: float
    cpu: float
    samples: int


@dataclass(frozen=True, slots=True)
class Times:
    rows: tuple[Row, ...]
    seconds: float
    cpu: float
    samples: int
    steps: int

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0


def times(window: Window, least: int = 25) -> Times | None:
    """The newest fact without what the watcher itself took; ``None`` where too few looks were taken to speak of shares."""
    fact: Fact | None = window.last("time")
    if fact is None or int(fact.get("samples") or 0) < least:
        return None
    rows = tuple(Row(tuple(p for p in map(Location.from_json, r.get("stack") or ()) if p is not None), r.get("kind"), str(r.get("via") or ""), str(r.get("leaf") or ""),
                     float(r.get("seconds") or 0), float(r.get("cpu") or 0), int(r.get("samples") or 0)) for r in fact.get("rows") or ())
    ours = [r for r in rows if r.kind == "osler"]
    return Times(tuple(r for r in rows if r.kind != "osler"), float(fact.get("seconds") or 0) - sum(r.seconds for r in ours),
                 float(fact.get("cpu") or 0) - sum(r.cpu for r in ours), int(fact.get("samples") or 0) - sum(r.samples for r in ours), int(fact.get("steps") or 0))


@lru_cache(maxsize=64)
def _epoch_functions(text: str, training: frozenset[str]) -> frozenset[str]:
    """Training functions that hold a loop which trains: whoever calls them in a loop loops over epochs."""
    module = parse(text)
    functions = [n for n in ast.walk(module) if isinstance(n, FUNCTIONS)] if module is not None else []
    found: frozenset[str] = frozenset()
    for _ in range(4):
        more = frozenset(f.name for f in functions if any(isinstance(n, LOOPS) and trains(n, training) for n in ast.walk(f))
                         or any(call_name(c) in found for c in calls(f)))
        if more == found:
            break
        found = more
    return found


def is_step_loop(window: Window, file: str, loop: Loop) -> bool:
    """The loop trains, one or a few steps a turn: no loop inside it does, in its text or in the functions it calls."""
    training = training_functions(window, file)
    if not trains(loop, training):
        return False
    if any(isinstance(n, LOOPS) and n is not loop and trains(n, training) for n in ast.walk(loop)):
        return False
    epochs = _epoch_functions(window.sources.get(file, ""), training)
    return not any(call_name(c) in epochs for c in calls(loop))


def step_line(window: Window, stack: tuple[Location, ...]) -> Location | None:
    """The line in the body of the training loop that a stack passes through at every step; ``None`` where it is outside of
    any, or behind a condition that is true only now and then."""
    for frame in stack:
        statements = around(window, frame)
        inner = below_function(statements)
        loops = [i for i, s in enumerate(inner) if isinstance(s, LOOPS)]
        for i in reversed(loops):
            loop = inner[i]
            if isinstance(loop, LOOPS) and is_step_loop(window, frame.file, loop):
                if frame.line < loop.body[0].lineno:
                    return None
                skipped = any(isinstance(s, ast.If) and rare(s.test) and isinstance(s.body[-1], ast.Continue) and s.lineno < frame.line for s in loop.body)
                return frame if not skipped and not any(isinstance(s, ast.If) and rare(s.test) for s in inner[i:]) else None
        if any(isinstance(s, ast.If) and rare(s.test) for s in inner):
            return None
        if frame.function in BY_FRAMEWORK:
            return frame
    return None


def rare(test: ast.AST) -> bool:
    """A condition like ``step % 50 == 0``, not ``step % 1 == 0``."""
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and not (isinstance(n.right, ast.Constant) and n.right.value == 1) for n in ast.walk(test))


def step_loops(window: Window) -> Iterator[tuple[str, Loop]]:
    """All training loops of the sources."""
    for file, text in window.sources.items():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, LOOPS) and is_step_loop(window, file, node):
                yield file, node


def innermost(window: Window, at: Location) -> ast.stmt | None:
    """The innermost statement at a line."""
    statements = around(window, at)
    return statements[-1] if statements else None


def header(statement: ast.stmt) -> list[ast.AST]:
    """What a statement itself evaluates, without the blocks inside it."""
    if isinstance(statement, ast.For | ast.AsyncFor):
        return [statement.iter]
    if isinstance(statement, ast.While | ast.If):
        return [statement.test]
    if isinstance(statement, ast.With | ast.AsyncWith):
        return [i.context_expr for i in statement.items]
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Try)):
        return []
    return [statement]
