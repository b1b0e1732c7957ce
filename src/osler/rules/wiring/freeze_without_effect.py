from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import nodes, quoted
from osler.rules.graph_questions import count, ever_optimized, modules, parameters, reached
from osler.rules.script import around, calls, dotted, targets

MISSPELT = frozenset(("require_grad", "requires_grads", "require_grads", "required_grad", "requires_gradient", "require_gradient", "requiresgrad", "required_grads",
                      "requires_grad_"))


@rule("freeze-without-effect", "wiring")
def check(window: Window, *, least_parameters: int = 1) -> Iterator[Finding]:
    """A line that should freeze parameters does nothing.

    What it is: `requires_grad = False` is set on a module, which only makes a new attribute; the attribute is misspelt (`require_grad`); or `==` stands
    for `=`.
    How it is seen: the line is in the user's text, and at least `least_parameters` parameters of that module (of the model, for the other two) are held by an
    optimizer and reached by the loss: they train.
    Why it matters: the pretrained trunk that was to stay as it is drifts, and memory and time are spent on its gradients.
    What to do: `module.requires_grad_(False)`, or set `requires_grad` on every parameter.
    When this is wrong: a class may define `requires_grad` as a property of its own.
    Source: torch documentation of Module.requires_grad_; mmpretrain issue 702 (stages that were never frozen). A fact of the text and of the graph, without
    thresholds.
    """
    if not window.final and window.n_steps < 3:
        return
    training = ever_optimized(window) & reached(window)
    if not training:
        return
    for at, node in nodes(window, lambda n: isinstance(n, ast.Assign | ast.Expr)):
        said = freezes(node)
        if said is None:
            continue
        kind, owner = said
        uids = training if kind != "module" else training & (held_by(window, owner) if "." in owner else by_loop(window, at, owner))
        frozen = {u for u, p in parameters(window).items() if not p.get("requires_grad", True)}
        if len(uids) < least_parameters or (kind != "module" and frozen):
            continue
        yield told(window, at, kind, len(uids))
        return


def freezes(node: ast.AST) -> tuple[str, str] | None:
    """What is wrong with a statement that means to freeze: (module | misspelt | comparison, what it is about)."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare) and len(node.value.ops) == 1 and isinstance(node.value.ops[0], ast.Eq):
        left, right = node.value.left, node.value.comparators[0]
        if isinstance(left, ast.Attribute) and left.attr == "requires_grad" and isinstance(right, ast.Constant) and right.value is False:
            return "comparison", ""
        return None
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant) or node.value.value is not False:
        return None
    for target in node.targets:
        if isinstance(target, ast.Attribute) and target.attr in MISSPELT:
            return "misspelt", ""
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            return "module", dotted(target.value) or ast.unparse(target.value)
    return None


def held_by(window: Window, owner: str) -> set[int]:
    """Parameters below the module that an expression such as ``model.backbone`` or ``self.encoder`` names; none where it names a parameter."""
    last = owner.split(".")[-1]
    mods, known = modules(window), parameters(window)
    names = [m for m in mods.values() if m["name"] == last or m["name"].endswith("." + last)]
    if any(p["name"] == last or p["name"].endswith("." + last) for p in known.values()):
        return set()
    inside = set()
    for m in names:
        inside |= {u for u, p in known.items() if (o := mods.get(p["module"])) is not None and o["root"] == m["root"]
                   and (o["name"] == m["name"] or o["name"].startswith(m["name"] + "."))}
    return inside


def by_loop(window: Window, at: Location, name: str) -> set[int]:
    """Every parameter, where the name runs over modules; none where it runs over parameters or is anything else."""
    loops = [s for s in around(window, at) if isinstance(s, ast.For) and name in targets(s)]
    return set(parameters(window)) if loops and any(True for _ in calls(loops[-1].iter, "children", "modules", "named_children", "named_modules")) else set()


WHY = {"module": "requires_grad is set on a module, which freezes none of its parameters", "misspelt": "the attribute is misspelt and freezes nothing",
       "comparison": "requires_grad is compared, not assigned: nothing is frozen"}


def told(window: Window, at: Location, kind: str, total: int) -> Finding:
    return Finding(
        "freeze-without-effect", "certain", "harmful", WHY[kind], f"Write requires_grad_(False) on the module, or set p.requires_grad on each parameter: {quoted(window, at, 'that line')}.",
        Where.at(at), first_step=0,
        evidence=(Evidence(f"{count(total, 'parameter')} that the line should freeze {'is' if total == 1 else 'are'} held by an optimizer and reached by the loss", "graph", value=float(total),
                           threshold=0.0, samples=total),))
