from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.graph_questions import Pass, criteria, numel, passes
from osler.rules.lineage_values import pairs
from osler.rules.script import around, call_name, calls, function_around, targets, tree

ARITHMETIC = frozenset(("sub", "add", "mul", "div", "pow", "maximum", "minimum", "lt", "gt", "sub_", "add_", "mul_"))
ELEMENTWISE = frozenset(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
                         "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "kl_div"))
ADDS_AXIS = frozenset(("unsqueeze", "getitem", "view", "reshape", "expand", "unflatten", "unsqueeze_"))


@rule("shape-broadcast", "wiring")
def check(window: Window) -> Iterator[Finding]:
    """Prediction and target broadcast against each other.

    What it is: a prediction of shape [B, 1] meets a target of shape [B] (or the reverse), and the difference is a [B, B] table of
    every prediction against every target.
    How it is seen: shapes of the criterion's two arguments, or of the two operands of arithmetic in a hand-written loss; the result
    has more elements than either.
    Why it matters: the best answer to all targets at once is their mean, so the model learns a constant.
    What to do: give both the same shape: `prediction.squeeze(1)` or `target.unsqueeze(1)`.
    When this is wrong: deliberate tables of all pairs are made with an explicit new axis on one side and are not reported; neither is a
    target of one element, or a constant for each column.
    Source: torch's own warning "Using a target size that is different to the input size"; torch issue 16045.
    """
    for fact in criteria(window):
        found = told(window, fact)
        if found is not None:
            yield found
            return
    for run in passes(window):
        for op in run.operations:
            if op.name in ARITHMETIC and clash(run, op):
                yield by_hand(window, run, op)
                return


def joint(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The broadcast shape of two shapes, if there is one."""
    out = []
    for i in range(1, max(len(a), len(b)) + 1):
        x, y = a[-i] if i <= len(a) else 1, b[-i] if i <= len(b) else 1
        if x != y and 1 not in (x, y):
            return None
        out.append(max(x, y))
    return tuple(reversed(out))


def told(window: Window, fact: Fact) -> Finding | None:
    a, b = (tuple((fact.get(k) or {}).get("shape") or ()) for k in ("input", "target"))
    if fact.get("function") not in ELEMENTWISE or a == b or numel(a) == 1 or numel(b) == 1:
        return None
    both = joint(a, b)
    if both is None:
        return None
    table = numel(both) > max(numel(a), numel(b))
    if table and len(a) == len(b) and len(a) > 2:
        return None  # equal ranks above two: axes were set by hand (quantile and ensemble losses)
    repeated = not table and numel(b) > numel(a) and a[:1] == b[:1]
    severity = "harmful" if table or repeated else "note"
    calls = int(fact.get("sampled") or 1)
    return Finding(
        "shape-broadcast", "certain", severity, f"prediction {list(a)} and target {list(b)} broadcast to {list(both)} in {fact.get('function')}",
        f"Give both the same shape before {quoted(window, fact.at, str(fact.get('function')))}: " + (
            "prediction.squeeze(-1) or target.unsqueeze(-1)." if table else "one output for each target value."),
        Where.at(fact.at), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"{numel(a)} predictions and {numel(b)} targets make {numel(both)} differences", "criterion/shapes", value=float(numel(both)),
                           threshold=float(max(numel(a), numel(b))), samples=calls),),
        treatment="reshape-target", explains=("loss-plateau", "lr-too-low"))


def clash(run: Pass, op: Op) -> bool:
    """Two operands of equally many elements whose result is their table of all pairs, none of them given an axis on purpose."""
    if len(op.ins) != 2 or not op.outs or op.at is None:
        return False
    a, b = (run.trace.tensors[t] for t in op.ins)
    out = run.trace.tensors[op.outs[0]]
    n = numel(a.shape)
    if n < 2 or n != numel(b.shape) or len(a.shape) == len(b.shape) or numel(out.shape) <= n or joint(a.shape, b.shape) != out.shape:
        return False
    if [d for d in a.shape if d > 1] != [d for d in b.shape if d > 1] or not (a.requires_grad or b.requires_grad):
        return False
    learned = [t for t in op.ins if run.trace.tensors[t].requires_grad]
    return not any(given_axis(run, t, op.index) for t in learned)


def given_axis(run: Pass, tid: int, before: int) -> bool:
    """The tensor got its axis of size one by an explicit view of a tensor without it."""
    op = run.trace.producer(tid, before)
    if op is None or not op.ins or op.name not in ADDS_AXIS:
        return False
    return len(run.trace.tensors[op.ins[0]].shape) < len(run.trace.tensors[tid].shape)


def by_hand(window: Window, run: Pass, op: Op) -> Finding:
    a, b, out = (run.trace.tensors[t].shape for t in (*op.ins, op.outs[0]))
    at = handed(window, op.at)
    return Finding(
        "shape-broadcast", "certain", "harmful", f"{list(a)} and {list(b)} broadcast to {list(out)} in the loss",
        f"Give both operands of {quoted(window, op.at, op.name)} the same shape: .squeeze(-1) on one or .unsqueeze(-1) on the other.",
        Where.at(at or op.at, also=(str(op.at),) if at is not None else ()), first_step=op.step,
        evidence=(Evidence(f"{op.name} of two tensors with {numel(a)} elements each gives {numel(out)}: every one against every other", "trace",
                           value=float(numel(out)), threshold=float(numel(a))),),
        treatment="reshape-target", explains=("loss-plateau", "lr-too-low"))


def handed(window: Window, at: Location | None) -> Location | None:
    """A loss of the user's own that gets both tensors as they are: the line that calls it. Arguments that it works on first are its own affair."""
    module = tree(window, at.file) if at is not None else None
    if module is None or at is None:
        return None
    function = function_around(around(window, at))
    names = {a.arg for a in function.args.args} - {"self"} if function is not None else set()
    sides = [(n.left, n.right) for n in ast.walk(module) if isinstance(n, ast.BinOp) and n.lineno == at.line] if names else []
    plain = any(isinstance(a, ast.Name) and isinstance(b, ast.Name) and {a.id, b.id} <= names for a, b in sides)
    if function is None or not plain or any(targets(s) & names for s in ast.walk(function) if isinstance(s, ast.stmt) and s.lineno < at.line):
        return None
    owner = next((c for c in ast.walk(module) if isinstance(c, ast.ClassDef) and function in c.body), None)
    held = {t for s in ast.walk(module) if isinstance(s, ast.Assign) and owner is not None for goal, made in pairs(s) if isinstance(made, ast.Call) and call_name(made) == owner.name
            for t in [ast.unparse(goal)]}
    found = [c.lineno for c in calls(module) if (ast.unparse(c.func) in held and function.name in ("forward", "__call__"))
             or (owner is None and call_name(c) == function.name) or (isinstance(c.func, ast.Attribute) and c.func.attr == function.name and ast.unparse(c.func.value) in held)]
    return Location(at.file, found[0]) if found and len(set(found)) <= 2 else None
