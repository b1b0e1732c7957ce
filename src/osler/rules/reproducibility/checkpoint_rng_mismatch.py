from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import nodes
from osler.rules.script import FUNCTIONS, call_name, calls, tree, words

RANDOM_OPS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rand", "randn", "rand_like", "randn_like", "bernoulli",
                        "bernoulli_", "normal", "normal_", "uniform_", "multinomial", "randint", "randperm", "gumbel_softmax", "rrelu", "poisson", "exponential_"))
DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "DropPath", "StochasticDepth")
SAVES = frozenset(("get_rng_state", "fork_rng", "set_rng_state", "get_device_states", "set_device_states", "manual_seed", "preserve_rng_state", "get_state", "set_state", "CheckpointFunction"))
OTHER = {"random": ("random", "randint", "uniform", "choice", "gauss", "sample", "shuffle", "choices", "normalvariate", "randrange"),
         "np.random": ("rand", "randn", "uniform", "normal", "binomial", "random", "choice", "randint", "permutation", "random_sample")}
EFFECTS = ("exploding-gradients", "loss-diverged", "loss-nan", "loss-plateau", "loss-spikes", "lr-too-high", "nonfinite-gradient", "dropout-misuse", "singular-gradient", "script-failed",
           "dead-units", "lr-too-low", "nonfinite-input")


@rule("checkpoint-rng-mismatch", "reproducibility")
def check(window: Window) -> Iterator[Finding]:
    """Activation checkpointing recomputes the forward pass with other random numbers.

    **What it is.** The segment draws random numbers (dropout, noise, layers that are skipped at random), and the second forward,
    inside backward, draws others: with `preserve_rng_state=False`, in a recomputation written by hand that does not keep the state of
    the generator, or because the numbers come from Python, NumPy or a generator of the segment's own, whose state torch does not keep.

    **How it is seen.** The call of `checkpoint` with its `preserve_rng_state`, and whether the modules it runs hold an active dropout
    or the recorded operations draw numbers there. In the text: an autograd Function whose backward runs a stored function under
    `enable_grad` and names no generator state; `random.random()` and the like inside a checkpointed function.

    **Why it matters.** The gradients belong to another function than the loss: training is worse and noisier, or blows up.

    **What to do.** Leave preserve_rng_state at True; by hand, keep `torch.get_rng_state()` in forward and restore it inside
    `torch.random.fork_rng()` before the recomputation; draw such numbers with torch, or outside of the segment.

    **When this is wrong.** A segment without randomness may well switch the saving off, and is not reported.

    **Source.** PyTorch documentation of torch.utils.checkpoint; guided-diffusion issue 167; handbook B §12.
    """
    for f in {str(f.at): f for f in window.facts("checkpoint-call")}.values():
        if f.get("preserve_rng_state") is False and (what := randomness(window, f)):
            yield Finding(
                "checkpoint-rng-mismatch", "certain", "harmful", f"The recomputation of this segment draws other random numbers than its forward pass ({what})",
                "Leave preserve_rng_state at its default True.", Where.at(keyword_line(window, f) or f.at),
                evidence=(Evidence(f"{f.get('calls')} calls of checkpoint with preserve_rng_state=False; {what}", "checkpoint-call", None, None, int(f.get("calls") or 1)),), explains=EFFECTS)
            return
    yield from foreign(window)
    yield from by_hand(window)


def keyword_line(window: Window, f: Fact) -> Location | None:
    """The line that says `preserve_rng_state=False`, where the call itself does not."""
    found = [at for at, n in nodes(window, lambda n: isinstance(n, ast.keyword) and n.arg == "preserve_rng_state")]
    found += [at for at, n in nodes(window, lambda n: isinstance(n, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "preserve_rng_state" for k in n.keys))]
    if f.at is None or any(at.file == f.at.file and abs(at.line - f.at.line) <= 3 for at in found):
        return f.at
    return found[0] if len(found) == 1 else f.at


def modules(window: Window) -> dict[int, dict[str, Any]]:
    return {m["id"]: m for f in window.facts("modules") for m in f.get("modules") or ()}


def drops(module: dict[str, Any]) -> bool:
    attrs = module.get("attrs") or {}
    return (module.get("class") in DROPOUTS and (attrs.get("p") or 0.1) > 0) or bool(attrs.get("dropout") or 0) or bool(attrs.get("attention_dropout") or 0)


def randomness(window: Window, f: Fact) -> str | None:
    """What draws random numbers inside the segment: a dropout below the module that it runs, else a recorded operation under that line."""
    known = modules(window)
    run = known.get(f.get("module", -1))
    if run is not None:
        name = str(run.get("name") or "")
        inside = [m for m in known.values() if m.get("root") == run.get("root") and drops(m) and (not name or m is run or str(m.get("name")).startswith(name + "."))]
        if inside:
            return f"{inside[0].get('class')} {inside[0].get('name')}"
    at = f.at
    for trace in window.traces:
        for op in trace.ops:
            if op.name in RANDOM_OPS and at is not None and any(u.file == at.file and u.line == at.line for u in op.lines) and drawing(op.kw):
                return f"{op.name} at line {op.at.line}" if op.at is not None else op.name
    uids = set(f.get("uids") or ())
    if run is None and uids and (not window.traces or any(t.truncated for t in window.traces)):
        owners = [m for m in known.values() if uids & set(m.get("direct") or ())]
        prefix = common([str(m.get("name") or "") for m in owners])
        inside = [m for m in known.values() if m.get("root") in {o.get("root") for o in owners} and drops(m) and (not prefix or str(m.get("name") or "").startswith(prefix + "."))]
        if inside:
            return f"{inside[0].get('class')} {inside[0].get('name')}"
    return None


def drawing(kw: dict[str, Any]) -> bool:
    return kw.get("training", True) is not False and kw.get("p", 0.5) != 0


def common(names: list[str]) -> str:
    """The dotted name of the lowest module that holds all of these."""
    if not names:
        return ""
    if len(names) == 1:
        return names[0]
    parts = [n.split(".") for n in names]
    shared = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def random_in_program(window: Window) -> bool:
    return any(drops(m) for m in modules(window).values()) or any(op.name in RANDOM_OPS and drawing(op.kw) and op.module >= 0 for t in window.traces for op in t.ops)


def foreign(window: Window) -> Iterator[Finding]:
    """Numbers of Python, NumPy or an own generator, drawn inside a checkpointed function."""
    facts = window.facts("checkpoint-call")
    if not facts:
        return
    known = modules(window)
    uids = {u for f in facts for u in f.get("uids") or ()}
    classes = {str(m.get("class")) for m in known.values() if uids & set(m.get("direct") or ())}
    names = [str(m.get("name") or "") for m in known.values() if uids & set(m.get("direct") or ())]
    classes |= {str(m.get("class")) for m in known.values() if any(n.startswith(str(m.get("name")) + ".") for n in names) and m.get("name")}
    for file in {f.at.file for f in facts if f.at is not None}:
        module = tree(window, file)
        if module is None:
            continue
        given = {a.id for c in calls(module, "checkpoint") for a in c.args[:1] if isinstance(a, ast.Name)}
        given |= {a.attr for c in calls(module, "checkpoint") for a in c.args[:1] if isinstance(a, ast.Attribute)}
        bodies = [m for n in ast.walk(module) if isinstance(n, ast.ClassDef) and n.name in classes for m in n.body if isinstance(m, FUNCTIONS) and m.name == "forward"]
        bodies += [n for n in ast.walk(module) if isinstance(n, FUNCTIONS) and n.name in given]
        for body in bodies:
            if any(call_name(c) == "checkpoint" for c in calls(body)):
                continue
            for c in calls(body):
                whole = ast.unparse(c.func)
                own = any(k.arg == "generator" for k in c.keywords) and call_name(c) in RANDOM_OPS
                other = next((name for name, functions in OTHER.items() if any(whole in (f"{name}.{g}", f"numpy.random.{g}") for g in functions)), None)
                if own or other or (isinstance(c.func, ast.Attribute) and "rng" in words(c.func.value) and c.func.attr in OTHER["np.random"]):
                    yield Finding("checkpoint-rng-mismatch", "certain", "harmful", f"`{ast.unparse(c)}` inside a checkpointed segment draws anew when backward recomputes it",
                                  "Draw it with torch's global generator, whose state checkpoint restores, or draw it outside and pass it in.", Where.at(Location(file, c.lineno)),
                                  evidence=(Evidence(f"{body.name} runs under torch.utils.checkpoint, which keeps the state of torch's global generators only", "source", None, None, 1),), explains=EFFECTS)
                    return


def by_hand(window: Window) -> Iterator[Finding]:
    """An autograd Function that recomputes in backward and keeps no generator state."""
    for file in {f.at.file for f in window.all_facts if f.at is not None}:
        module = tree(window, file)
        for cls in ast.walk(module) if module is not None else ():
            if not isinstance(cls, ast.ClassDef) or not any(ast.unparse(b).split(".")[-1] == "Function" for b in cls.bases):
                continue
            methods = {m.name: m for m in cls.body if isinstance(m, FUNCTIONS)}
            forward, backward = methods.get("forward"), methods.get("backward")
            if forward is None or backward is None or SAVES & words(cls):
                continue
            stored = {t.attr for s in ast.walk(forward) if isinstance(s, ast.Assign) for x in s.targets for t in (x.elts if isinstance(x, ast.Tuple) else [x]) if isinstance(t, ast.Attribute)}
            again = [c for c in calls(backward) if (isinstance(c.func, ast.Attribute) and c.func.attr in stored) or any(isinstance(n, ast.Attribute) and n.attr in stored for n in ast.walk(c.func))]
            aliases = {t.id for s in ast.walk(backward) if isinstance(s, ast.Assign) and any(isinstance(n, ast.Attribute) and n.attr in stored for n in ast.walk(s.value))
                       for x in s.targets for t in (x.elts if isinstance(x, ast.Tuple) else [x]) if isinstance(t, ast.Name)}
            again += [c for c in calls(backward) if isinstance(c.func, ast.Name) and c.func.id in aliases]
            again += [c for s in ast.walk(backward) if isinstance(s, ast.With) and "enable_grad" in words(s) for c in calls(s)
                      if isinstance(c.func, ast.Name) and c.func.id in {n.name for n in ast.walk(module) if isinstance(n, FUNCTIONS)}] if module is not None else []
            used = any(isinstance(c.func, ast.Attribute) and c.func.attr == "apply" and ast.unparse(c.func.value).split(".")[-1] == cls.name for c in calls(module))
            if again and "enable_grad" in words(backward) and used and random_in_program(window):
                line = min(again, key=lambda c: c.lineno).lineno
                yield Finding("checkpoint-rng-mismatch", "certain", "harmful", f"{cls.name} recomputes its forward pass in backward without the random state that it ran with",
                              "Keep torch.get_rng_state() in forward; in backward restore it inside torch.random.fork_rng() before the recomputation.",
                              Where.at(Location(file, line), also=(f"{file}:{forward.lineno}",)),
                              evidence=(Evidence(f"`{window.line(file, line).strip()}`; {cls.name} names no generator state, and the model draws random numbers", "source", None, None, 1),), explains=EFFECTS)
                return
