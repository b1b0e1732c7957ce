from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op, Trace
from osler.core.window import Window
from osler.rules import scaling
from osler.rules.code_questions import nodes
from osler.rules.script import assignment, calls, tree, words

SPACING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
HALVES = ("bfloat16", "float16", "half", "bf16", "fp16")
EFFECTS = ("lr-too-low", "loss-plateau", "params-not-moving", "vanishing-gradients", "shadow-weights-stale", "optimizer-hyperparams")


@rule("low-precision-updates-lost", "precision")
def check(window: Window, *, stuck: float = 0.6, early: int = 100, samples: int = 2) -> Iterator[Finding]:
    """Updates smaller than the spacing of bf16 or fp16 weights are rounded away.

    **What it is.** A bfloat16 number has 8 significant bits: a weight of 0.05 changes in steps of 0.0002. An optimizer that adds
    1e-5 to it adds nothing, at no step, ever. The same holds for a moving average in half precision with a decay of 0.999.

    **How it is seen.** In sampled steps (the first `early`) at least `stuck` of the elements that had a gradient did not change
    at all, the weights being 16 bits wide. For averages: the recorded update of a 16-bit tensor with a weight no larger than its spacing
    (2^-8 for bfloat16, 2^-11 for float16).

    **Why it matters.** Training stands still or moves only the smallest weights, while the loss of a float32 run falls.

    **What to do.** Keep the weights (or a master copy) in float32 and use autocast for the arithmetic; keep averages in float32.
    Stochastic rounding or Kahan summation help where memory forbids that.

    **When this is wrong.** Late in training, updates are small anyway: only early samples count. A learning rate that is large enough moves most
    of the weights, and nothing is said.

    **Source.** Handbook B §13; Zamirai et al. 2020 (Revisiting BFloat16 Training); Micikevicius et al. 2018 (master weights).
    """
    for f in {f.get("optimizer"): f for f in window.facts("half-weights")}.values():
        seen = [s for s in f.get("samples") or () if s[1] == s[1]]
        rows = [s for s in seen if s[0] - seen[0][0] <= early]
        share = float(np.median([s[1] for s in rows])) if rows else 0.0
        if len(rows) >= samples and share >= stuck and int(f.get("parameters") or 0) * 2 >= int(f.get("of") or 0):
            made = next((o for o in window.facts("optimizer") if o.get("index") == f.get("optimizer")), None)
            lr = (made.get("defaults") or {}).get("lr") if made is not None else None
            yield Finding(
                "low-precision-updates-lost", "certain" if share > 0.8 else "measured", "harmful" if share > 0.8 or not learns(window) else "note",
                f"{share:.0%} of the {f.get('dtype')} weights that have a gradient do not change in a step" + (f" at learning rate {lr:g}" if isinstance(lr, int | float) else ""),
                "Keep float32 weights and use torch.autocast for the arithmetic (or keep a float32 master copy).",
                Where.at(cast_line(window) or (made.at if made is not None else None)),
                evidence=(Evidence(f"median over {len(rows)} sampled steps: {share:.3f} of the elements with a gradient stayed exactly as they were", "half-weights", share, stuck, len(rows)),),
                explains=EFFECTS, treatment="fp32")
            return
    yield from averages(window)
    yield from by_hand(window)


def learns(window: Window, fall: float = 0.3) -> bool:
    """Whether the loss fell by that share all the same."""
    loss = window.steps["loss"].astype(float)
    loss = loss[np.isfinite(loss)]
    n = max(3, len(loss) // 10)
    return len(loss) > 2 * n and float(np.median(loss[-n:])) < (1 - fall) * float(np.median(loss[:n]))


def cast_line(window: Window) -> Location | None:
    """Where the weights were made 16 bits wide."""
    def casts(n: ast.AST) -> bool:
        if not isinstance(n, ast.Call) or not isinstance(n.func, ast.Attribute):
            return False
        name = n.func.attr
        given = {w for a in [*n.args, *(k.value for k in n.keywords)] for w in words(a)}
        if name == "set_default_dtype":
            return bool(given & set(HALVES))
        owner = scaling.last(n.func.value)
        modelish = isinstance(n.func.value, ast.Call) or bool(re.search(r"model|net|module|self|encoder|decoder|backbone|student|policy|gpt|(^|_)(m|lm|g|d)$", owner, re.I))
        if name in ("half", "bfloat16") and not n.args:
            return modelish
        return name == "to" and bool(given & set(HALVES) or aliases(window) & given) and modelish and not isinstance(n.func.value, ast.Subscript)
    found = nodes(window, casts)
    makers = {f.at.file for f in window.facts("optimizer") if f.at is not None}
    first = next((f.at for f in window.facts("optimizer") if f.at is not None), None)
    here = [at for at, _ in found if at.file in makers] or [at for at, _ in found]
    above = [at for at in here if first is not None and at.file == first.file and at.line <= first.line]
    if here:
        at = above[-1] if above else here[0]
        names = {w for n in ast.walk(tree(window, at.file) or ast.Module([], [])) if isinstance(n, ast.Call) and n.lineno == at.line and casts(n) for w in words(n)} & aliases(window)
        named = next((a for name in names if (a := assignment(window, at.file, name, at.line)) is not None), None)
        return Location(at.file, named.lineno, at.function) if named is not None else at
    given = nodes(window, lambda n: isinstance(n, ast.keyword) and n.arg in ("dtype", "torch_dtype", "param_dtype") and bool(set(words(n.value)) & set(HALVES)))
    return given[0][0] if given else None


def aliases(window: Window) -> set[str]:
    """Names bound to a 16-bit type: `DTYPE = torch.bfloat16`, also as a default argument."""
    found: set[str] = set()
    for file in window.sources:
        module = tree(window, file)
        for n in ast.walk(module) if module is not None else ():
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Attribute) and n.value.attr in HALVES:
                found |= {scaling.last(t) for t in n.targets}
    return found - {""}


def averages(window: Window) -> Iterator[Finding]:
    """A 16-bit running average whose share of new values lies below half its spacing."""
    for trace in window.traces:
        for op in trace.ops:
            plain = op.name == "mul" and rebound(window, op)
            if op.at is None or not op.outs or not (plain or (op.name in ("lerp_", "mul_", "add_", "copy_") and not op.grad)):
                continue
            info = trace.tensors[op.ins[0] if plain and op.ins else op.outs[0]]
            limit = SPACING.get(info.dtype)
            if limit is None or not (info.old or plain) or info.requires_grad or (info.uid >= 0 and trained(window, info.uid)):
                continue
            weight = new_share(window, trace, op)
            if weight is not None and 0 < weight <= 1.1 * limit:
                yield Finding(
                    "low-precision-updates-lost", "certain", "harmful", f"A moving average in {info.dtype} takes in {weight:.2g} of each new value: no more than its spacing, so it stands still",
                    "Keep the average in float32.", Where.at(made_line(window, op) or op.at, also=(str(op.at),)),
                    evidence=(Evidence(f"`{window.line(op.at.file, op.at.line).strip()}` on {info.dtype} {info.shape}", "trace", weight, limit, 1),), explains=EFFECTS, treatment="fp32")
                return


def rebound(window: Window, op: Op) -> bool:
    """`e.data = e.data * decay + ...`, `shadow[k] = decay * shadow[k] + ...`: an average that is assigned anew."""
    at = op.at
    module = tree(window, at.file) if at is not None else None
    if at is None or module is None:
        return False
    for s in ast.walk(module):
        if isinstance(s, ast.Assign) and s.lineno <= at.line <= (s.end_lineno or s.lineno):
            target, given = s.targets[0], s.value
            same = isinstance(target, ast.Attribute | ast.Subscript) and any(ast.unparse(n) == ast.unparse(target) for n in ast.walk(given))
            return same and isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add)
    return False


def trained(window: Window, uid: int) -> bool:
    return any(uid in (f.get("uids") or ()) for f in window.facts("optimizer"))


def new_share(window: Window, trace: Trace, op: Op) -> float | None:
    """The weight of the new value: the constant of `lerp_`, one minus the decay of `mul_`, as the line and the names in it say."""
    at = op.at
    if at is None:
        return None
    kw = [v for k, v in op.kw.items() if k in ("weight", "alpha") and isinstance(v, int | float)]
    if kw:
        return float(kw[0])
    module = tree(window, at.file)
    spans = [s for s in ast.walk(module) if isinstance(s, ast.stmt) and s.lineno <= at.line <= (s.end_lineno or s.lineno) and not hasattr(s, "body")] if module is not None else []
    for s in spans:
        for c in calls(s, op.name):
            given = c.args[-1] if op.name == "lerp_" and len(c.args) > 1 else next((k.value for k in c.keywords if k.arg in ("weight", "alpha")), c.args[0] if c.args and op.name == "mul_" else None)
            value = evaluate(window, at.file, given)
            if value is not None:
                return 1 - value if op.name == "mul_" and value > 0.5 else value if op.name != "mul_" else None
        if op.name in ("copy_", "mul"):
            factors = [v for n in ast.walk(s) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for side in (n.left, n.right) for v in [evaluate(window, at.file, side)] if v is not None]
            large = [v for v in factors if 0.9 < v < 1]
            if large:
                return 1 - large[0]
    return None


def evaluate(window: Window, file: str, node: ast.AST | None) -> float | None:
    """Number of an expression of constants and names that hold one."""
    if node is None:
        return None
    known = scaling.number(node)
    if known is not None:
        return known
    if isinstance(node, ast.Name | ast.Attribute):
        return passed(window, file, scaling.last(node))
    if isinstance(node, ast.BinOp):
        a, b = evaluate(window, file, node.left), evaluate(window, file, node.right)
        return scaling.number(ast.BinOp(ast.Constant(a), node.op, ast.Constant(b))) if a is not None and b is not None else None
    return None


def passed(window: Window, file: str, name: str) -> float | None:
    """Number behind a name: bound to it, its default, or what calls of the class or function that takes it give."""
    found = scaling.value_of(window, file, name, 0)
    module = tree(window, file)
    if module is None:
        return found
    for owner in ast.walk(module):
        if not isinstance(owner, ast.FunctionDef | ast.ClassDef):
            continue
        functions = [owner] if isinstance(owner, ast.FunctionDef) else [f for f in owner.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        for f in functions:
            names = [a.arg for a in f.args.args]
            if name not in names or (isinstance(owner, ast.FunctionDef) and owner.name == "__init__"):
                continue
            at = names.index(name) - (names[0] == "self")
            for c in calls(module, owner.name):
                given = next((k.value for k in c.keywords if k.arg == name), c.args[at] if 0 <= at < len(c.args) else None)
                value = scaling.number(given)
                if value is not None:
                    return value
    return found


def made_line(window: Window, op: Op) -> Location | None:
    """Where the average was made 16 bits wide, when the same file says so in words of an average."""
    if op.at is None:
        return None
    found = nodes(window, lambda n: isinstance(n, ast.Assign) and bool({"half", "bfloat16", "float16"} & words(n.value)) and any(
        re.search(r"ema|shadow|avg|average|teacher|target|running", ast.unparse(t), re.I) for t in n.targets))
    return found[0][0] if found and found[0][0].file == op.at.file else None


def by_hand(window: Window, largest: float = 2e-3) -> Iterator[Finding]:
    """Plain gradient steps written by hand, `w -= lr * w.grad`, on leaves that were made 16 bits wide: no optimizer takes part."""
    if window.facts("half-weights") or window.facts("optimizer"):
        return
    wide = nodes(window, lambda n: isinstance(n, ast.Assign) and bool(set(HALVES) & words(n.value)) and "requires_grad_" in words(n.value))
    steps = nodes(window, lambda n: isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Sub) and "grad" in words(n.value))
    for at, step in steps:
        rates = [v for n in ast.walk(step) if isinstance(n, ast.BinOp) for side in (n.left, n.right) for v in [evaluate(window, at.file, side)] if v]
        if wide and rates and abs(rates[0]) <= largest:
            yield Finding("low-precision-updates-lost", "suspected", "harmful", f"Steps of {abs(rates[0]):g} times the gradient are taken on 16-bit weights", "Keep float32 weights.",
                          Where.at(wide[0][0]), evidence=(Evidence(f"`{window.line(at.file, at.line).strip()}`", "source", abs(rates[0]), largest, 1),), explains=EFFECTS)
            return
