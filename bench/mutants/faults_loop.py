"""Faults of optimizer, schedule and the order of calls in the loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from script import Script, keyword, last_name, operator, with_keyword


def _rate(script: Script, factors: tuple[float, ...], *causes: str) -> Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
    call = script.optimizer()
    lr = keyword(call, "lr") if call is not None else None
    if call is not None and lr is not None and isinstance(lr.value, ast.Constant):
        for factor in factors:
            yield f"x{factor:g}", script.replaced((lr.value, repr(lr.value.value * factor))), (call.lineno,), causes


@operator
def learning_rate_up(script):
    yield from _rate(script, (10, 100, 1000), "lr-too-high")


@operator
def learning_rate_down(script):
    yield from _rate(script, (1e-2, 1e-3, 1e-4), "lr-too-low")


@operator
def weight_decay_up(script):
    call = script.optimizer()
    if call is not None:
        for value in ("1.0", "10.0"):
            yield value, with_keyword(script, call, "weight_decay", value), (call.lineno,), ("optimizer-hyperparams",)


@operator
def momentum_or_beta_up(script):
    call = script.optimizer()
    if call is not None and last_name(call.func) in ("SGD", "RMSprop"):
        yield "momentum 0.999", with_keyword(script, call, "momentum", "0.999"), (call.lineno,), ("optimizer-hyperparams", "lr-too-high")
    elif call is not None:
        yield "betas 0.999 0.9", with_keyword(script, call, "betas", "(0.999, 0.9)"), (call.lineno,), ("optimizer-hyperparams",)
        yield "eps 1", with_keyword(script, call, "eps", "1.0"), (call.lineno,), ("optimizer-hyperparams", "lr-too-low")


@operator
def optimizer_stale(script):
    model, call = script.model(), script.optimizer()
    if model is not None and call is not None:
        statement = script.parents[call]
        if isinstance(statement, ast.Assign):
            yield "model built again", script.after(statement, script.of(model)), (statement.lineno, statement.lineno + 1), ("optimizer-wrong-params",)


@operator
def optimizer_partial(script):
    call = script.optimizer()
    if call is not None and call.args and script.of(call.args[0]).endswith(".parameters()"):
        for part in ("[-2:]", "[:2]"):
            yield part, script.replaced((call.args[0], f"list({script.of(call.args[0])}){part}")), (call.lineno,), ("optimizer-wrong-params",)


@operator
def clip_tiny(script):
    for call in script.calls("clip_grad_norm_"):
        value = keyword(call, "max_norm")
        node = value.value if value is not None else call.args[1]
        for limit in ("1e-4", "1e-6"):
            yield limit, script.replaced((node, limit)), (call.lineno,), ("grad-clip-misuse", "lr-too-low")
    if not script.calls("clip_grad_norm_"):
        for step in script.steps()[:1]:
            name = "self.model" if "self." in script.of(step) else "net" if script.assigned("net") else "model"
            for limit in ("1e-3", "1e-5"):
                new = f"torch.nn.utils.clip_grad_norm_({name}.parameters(), {limit}); {script.of(step)}"
                yield f"added {limit}", script.replaced((step, new)), (step.lineno,), ("grad-clip-misuse", "lr-too-low")


@operator
def schedule_wrong(script):
    for statement in [s for s in script.statements("step") if "sched" in script.of(s)]:
        loop = script.parents[statement]
        inner = [n for n in ast.walk(loop) if isinstance(n, ast.For)] if isinstance(loop, ast.For) else []
        steps = [s for n in inner if n is not loop for s in ast.walk(n) if s in script.steps()]
        if steps and not statement.value.args:  # per epoch -> per batch
            moved = script.replaced((statement, "pass"), (steps[0], f"{script.of(steps[0])}; {script.of(statement)}"))
            yield "per batch", moved, (statement.lineno, steps[0].lineno), ("lr-schedule",)
    for call in script.calls("StepLR", "ReduceLROnPlateau", "CosineAnnealingLR"):
        name, value = {"StepLR": ("gamma", "0.001"), "ReduceLROnPlateau": ("mode", '"max"'), "CosineAnnealingLR": ("T_max", "3")}[last_name(call.func)]
        yield f"{name}={value}", with_keyword(script, call, name, value), (call.lineno,), ("lr-schedule",)
        if last_name(call.func) == "ReduceLROnPlateau":
            yield "patience=0", with_keyword(script, call, "patience", "0").replace("factor=0.3", "factor=0.01"), (call.lineno,), ("lr-schedule",)
        if last_name(call.func) == "StepLR":
            yield "step_size=1", with_keyword(script, call, "step_size", "1").replace("gamma=0.5", "gamma=0.05"), (call.lineno,), ("lr-schedule",)
    for name, value in (("WARMUP", "5000"), ("STEPS", "40")):
        for node in script.assigned(name) if "WARMUP" in script.text else ():
            constants = [n for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
            if name == "WARMUP" and constants:
                yield f"{name}={value}", script.replaced((constants[-1], value)), (node.lineno,), ("lr-schedule", "lr-too-low")


@operator
def zero_grad_dropped(script):
    found = script.statements("zero_grad")
    if found:
        yield "all", script.replaced(*((s, "pass") for s in found)), tuple(s.lineno for s in (*found, *script.steps())), ("grad-not-cleared",)


@operator
def zero_grad_before_step(script):
    found, steps = script.statements("zero_grad"), script.steps()
    if found and steps:
        text = script.replaced(*((s, "pass") for s in found), (steps[0], f"{script.of(found[0])}; {script.of(steps[0])}"))
        yield "between backward and step", text, (steps[0].lineno,), ("grad-cleared-before-step",)


@operator
def step_dropped(script):
    steps = script.steps()
    if steps:
        yield "never", script.replaced((steps[0], "pass")), (steps[0].lineno,), ("step-missing-or-rare",)


@operator
def eval_dropped(script):
    found = script.statements("eval")
    if found and re.search(r"Dropout|BatchNorm", script.text):
        yield "all", script.replaced(*((s, "pass") for s in found)), tuple(s.lineno for s in found), ("eval-mode-missing",)


@operator
def train_dropped(script):
    found = [s for s in script.statements("train") if not s.value.args]
    if found and re.search(r"Dropout|BatchNorm", script.text):
        yield "all", script.replaced(*((s, "pass") for s in found)), tuple(s.lineno for s in (*found, *script.statements("eval"))), ("train-mode-not-restored",)


@operator
def no_grad_dropped(script):
    blocks = [n for n in ast.walk(script.tree) if isinstance(n, ast.With) and "no_grad" in script.of(n.items[0].context_expr)]
    if blocks:
        edits = [(n.items[0].context_expr, "__import__('contextlib').nullcontext()") for n in blocks]
        yield "all", script.replaced(*edits).replace("loss.item()", "loss.item()"), tuple(n.lineno for n in blocks), ("no-grad-missing",)


@operator
def loss_detached(script):
    for call in script.loss_calls()[:1]:
        whole = script.of(call)
        yield "a new leaf", script.replaced((call, f"torch.tensor({whole}.item(), requires_grad=True)")), (call.lineno,), ("graph-broken", "step-missing-or-rare")
        first = script.of(call.args[0])
        yield "input detached", script.replaced((call.args[0], f"{first}.detach().requires_grad_()")), (call.lineno,), ("graph-broken", "step-missing-or-rare")
