from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import dotted, nodes, quoted
from osler.rules.graph_questions import modules, parameters

COPIES = frozenset(("clone", "Parameter", "deepcopy", "detach", "tensor", "copy"))


@rule("tied-weights-broken", "wiring")
def check(window: Window) -> Iterator[Finding]:
    """Parameters meant to be shared are separate.

    What it is: the output layer is given a copy of the embedding's weights (a new nn.Parameter, a clone, copy_), or the sharing is
    undone later by replacing one of the two.
    How it is seen: an embedding and a linear layer with equal values at the start in separate memory; in the source, a `.weight` assigned
    from a copy of another layer's `.weight`, or compared (==) where an assignment was meant.
    Why it matters: the two drift apart from the first step: twice the parameters, half the signal for each.
    What to do: assign the Parameter itself: `self.head.weight = self.embed.weight`, after everything that replaces or re-initialises it.
    When this is wrong: starting one layer from a copy of another on purpose looks the same; ignore it then.
    Source: Press & Wolf, Using the Output Embedding to Improve Language Models (2017).
    """
    fact = window.last("twins")
    known = {p["name"]: p for p in parameters(window).values()}
    if fact is not None:
        a, b = str(fact.get("a")), str(fact.get("b"))
        if all(known.get(n, {}).get("requires_grad", True) for n in (a, b)):
            place = copied(window) or fact.at
            yield told(window, place, f"{a} and {b} start equal and are separate tensors",
                       Evidence(f"{a} and {b} ({fact.get('shape')}) hold equal values at the first step in separate memory", "twins", value=0.0, threshold=0.0, samples=1), b)
            return
    place = compared(window)
    if place is not None and (len(known) or modules(window)):
        yield told(window, place, "two weights are compared where one should be assigned to the other",
                   Evidence(f"{quoted(window, place, 'the line')} compares and drops the result", "source"), None)
        return
    place = copied(window)
    if place is not None and shares_no_name(window, place):
        yield told(window, place, "a weight is tied to a copy of another weight",
                   Evidence(f"{quoted(window, place, 'the line')} makes a new tensor: the two are equal once and trained apart", "source"), None)


def told(window: Window, place: Location | None, title: str, evidence: Evidence, parameter: str | None) -> Finding:
    return Finding("tied-weights-broken", "certain", "harmful", title, f"Assign the parameter itself at {quoted(window, place, 'the tie')}: a.weight = b.weight.",
                   Where.at(place, parameter=parameter), first_step=0, evidence=(evidence,), explains=("overfit",))


def weight_of_self(node: ast.AST) -> str | None:
    """``self.head`` for ``self.head.weight`` (with .data, .T or .t() behind it)."""
    text = dotted(node)
    return text.split(".weight")[0] if text.startswith("self.") and ".weight" in text else None


def copied(window: Window) -> Location | None:
    """`self.a.weight = nn.Parameter(self.b.weight...)` and its like, inside one class."""
    def ties(node: ast.AST) -> bool:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return False
        left = weight_of_self(node.targets[0])
        right = {w for n in ast.walk(node.value) if isinstance(n, ast.Attribute) and (w := weight_of_self(n))}
        calls = {dotted(n.func).split(".")[-1] for n in ast.walk(node.value) if isinstance(n, ast.Call)}
        return left is not None and bool(right - {left}) and bool(calls & COPIES)
    found = nodes(window, ties)
    return found[0][0] if found else None


def compared(window: Window) -> Location | None:
    def drops(node: ast.AST) -> bool:
        return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare) and len(node.value.ops) == 1 and isinstance(node.value.ops[0], ast.Eq | ast.Is)
                and all(dotted(n).endswith("weight") for n in (node.value.left, *node.value.comparators)))
    found = nodes(window, drops)
    return found[0][0] if found else None


def shares_no_name(window: Window, place: Location) -> bool:
    """The assignment stands where a model is built (`__init__` or a method that ties), not in an update."""
    text = window.line(place.file, place.line)
    return "Parameter" in text or "clone" in text or "deepcopy" in text
