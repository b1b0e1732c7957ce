from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import attribute_line, dotted, nodes, quoted
from osler.rules.graph_questions import copies, count, ever_optimized, parameters, reached

CURE = {"module in list": "Wrap it in nn.ModuleList", "module in dict": "Use nn.ModuleDict", "tensor": "Make it an nn.Parameter",
        "tensor in list": "Use nn.ParameterList", "tensor in dict": "Use nn.ParameterDict",
        "non-leaf tensor": "Assign the nn.Parameter itself (move or scale it before wrapping, not after)"}


@rule("unregistered-params", "wiring")
def check(window: Window, *, least_built: int = 3) -> Iterator[Finding]:
    """Weights that are no registered parameters.

    What it is: layers kept in a Python list or dict, a trainable tensor that is no nn.Parameter, a Parameter that was moved or scaled
    after wrapping (and so is a result, not a leaf), or a layer constructed inside forward.
    How it is seen: tensors with requires_grad that a module holds outside its registration, reached by the loss and in no optimizer;
    modules with parameters constructed at the same line inside forward at least `least_built` times.
    Why it matters: parameters(), state_dict() and to() do not see them: they are never trained, saved or moved. A layer made in forward
    is random again in every step.
    What to do: nn.ModuleList, nn.ModuleDict, nn.Parameter; construct layers in __init__.
    When this is wrong: frozen or loaded networks hidden in a list on purpose (teachers), and list items handed to the optimizer, are not reported.
    Source: torch issues 666 and 72580.
    """
    yield from built_in_forward(window, least_built)
    known, held, served = parameters(window), ever_optimized(window), reached(window)
    done: set[tuple[int, str]] = set()
    for fact in window.facts("unregistered"):
        key = (int(fact.get("holder", -1)), str(fact.get("attribute")))
        uids = set(fact.get("uids") or ())
        kind = str(fact.get("kind"))
        if key in done or (uids and uids & held) or int(fact.get("root", -1)) in copies(window):
            continue
        if uids and all(known[u].get("loaded") or known[u].get("stepped") or not known[u].get("requires_grad", True) for u in uids if u in known) and uids & set(known):
            continue
        if kind != "non-leaf tensor" and uids and window.facts("graph") and not uids & served:
            continue
        if kind == "non-leaf tensor" and not from_parameter(window, str(fact.get("attribute"))):
            continue  # a kept activation, not a weight
        done.add(key)
        yield told(window, fact, uids & served)


def from_parameter(window: Window, attribute: str) -> bool:
    """The attribute is assigned from an expression around nn.Parameter or a tensor made with requires_grad."""
    def wraps(node: ast.AST) -> bool:
        return (isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute) and t.attr == attribute for t in node.targets)
                and any(isinstance(n, ast.Call) and (dotted(n.func).endswith("Parameter") or any(k.arg == "requires_grad" for k in n.keywords))
                        for n in ast.walk(node.value)))
    return bool(nodes(window, wraps))


def told(window: Window, fact: Fact, served: set[int]) -> Finding:
    attribute, kind, items = str(fact.get("attribute")), str(fact.get("kind")), int(fact.get("items") or 1)
    place = (attribute_line(window, attribute) if "module" not in kind else None) or fact.at or attribute_line(window, attribute)
    own = f"{fact.get('class')}.{attribute}"
    what = {"module in list": f"{count(items, 'module')} in a plain list", "module in dict": f"{count(items, 'module')} in a plain dict",
            "non-leaf tensor": "a tensor computed from a parameter"}.get(kind, "a trainable tensor that is no nn.Parameter")
    return Finding(
        "unregistered-params", "certain", "harmful", f"{own} holds {what}: the optimizer cannot see {count(int(fact.get('numel') or 0), 'weight')}",
        f"{CURE.get(kind, 'Register it')}: {quoted(window, place, f'self.{attribute}')}.", Where.at(place, module=own, parameter=attribute), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"{count(len(served), 'tensor')} of self.{attribute} get gradients from the loss and are in no optimizer ({fact.get('numel')} elements)", "graph",
                           value=float(len(served)), threshold=0.0, samples=len(served)),),
        treatment="register-params", explains=("loss-plateau", "lr-too-low", "vanishing-gradients", "optimizer-wrong-params"))


def built_in_forward(window: Window, least: int) -> Iterator[Finding]:
    newest = {(str(f.at), str(f.get("class"))): f for f in window.facts("module-built-in-step")}
    for fact in newest.values():
        counted = int(fact.get("count") or 0)
        if counted < least or not fact.get("inside") or fact.get("optimized"):
            continue
        yield Finding(
            "unregistered-params", "certain", "harmful", f"{fact.get('inside')}.forward constructs a new {fact.get('class')} in every call",
            f"Construct the layer of {quoted(window, fact.at, 'this line')} once in __init__ and call it here.", Where.at(fact.at), first_step=fact.get("first_step", fact.step),
            evidence=(Evidence(f"{counted} layers were constructed at this line over {fact.get('steps')} steps; none is in an optimizer", "module-built-in-step",
                               value=float(counted), threshold=float(least), samples=int(fact.get("steps") or counted) if not isinstance(fact.get("steps"), list) else counted),),
            treatment="register-params", explains=("loss-plateau", "lr-too-low", "optimizer-wrong-params"))
        return
