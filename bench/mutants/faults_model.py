"""Faults of the model."""

from __future__ import annotations

import ast
import re

from script import Script, keyword, last_name, operator


@operator
def layer_unregistered(script):
    for call in script.calls("ModuleList"):
        inner = script.of(call.args[0])
        yield "ModuleList -> list", script.replaced((call, inner)), (call.lineno,), ("unregistered-params",)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(node.value, ast.Call) \
                and last_name(node.value.func) in ("Linear", "Conv2d", "GRU"):
            name = f"self.{node.targets[0].attr}"
            text = script.replaced((node.value, f"[{script.of(node.value)}]"))
            yield f"{node.targets[0].attr} in a list", re.sub(rf"{re.escape(name)}\(", f"{name}[0](", text), (node.lineno,), ("unregistered-params",)


def _after_model(script: Script, *new: str) -> str | None:
    model = script.model()
    if model is None:
        return None
    name = "net" if script.assigned("net") else "model"
    return script.after(model, *(line.replace("MODEL", name) for line in new))


@operator
def initialisation(script):
    model = script.model()
    for variant, line in (("x20", "for p in MODEL.parameters(): p.data.mul_(20)"), ("x100", "for p in MODEL.parameters(): p.data.mul_(100)"),
                          ("zeros", "for p in MODEL.parameters(): nn.init.zeros_(p)"), ("constant", "for p in MODEL.parameters(): nn.init.constant_(p, 0.1)"),
                          ("x0.001", "for p in MODEL.parameters(): p.data.mul_(0.001)")):
        text = _after_model(script, line)
        if text is not None and model is not None:
            yield variant, text, (model.lineno, model.lineno + 1), ("bad-init",)


@operator
def layers_frozen(script):
    model = script.model()
    text = _after_model(script, "for p in list(MODEL.parameters())[:-2]: p.requires_grad_(False)")
    if text is not None and model is not None:
        yield "all but the head", text, (model.lineno + 1,), ("frozen-params",)
    text = _after_model(script, "for p in list(MODEL.parameters())[-2:]: p.requires_grad_(False)")
    if text is not None and model is not None:
        yield "the head", text, (model.lineno + 1,), ("frozen-params",)


@operator
def activation_swapped(script):
    text = re.sub(r"nn\.(ReLU|Tanh|GELU)\(\)", "nn.Sigmoid()", re.sub(r"torch\.relu\(", "torch.sigmoid(", script.text))
    lines = tuple(i for i, (a, b) in enumerate(zip(script.text.splitlines(), text.splitlines(), strict=True), 1) if a != b)
    yield "sigmoid", text, lines, ("vanishing-gradients", "lr-too-low", "bad-init", "output-range")
    text = re.sub(r"nn\.(ReLU|Tanh|GELU)\(\)", "nn.Hardtanh(0.0, 0.01)", re.sub(r"torch\.relu\(", "nn.functional.hardtanh(0.01 * ", script.text))
    yield "a narrow hardtanh", text, lines, ("vanishing-gradients", "dead-units", "bad-init", "lr-too-low")


@operator
def output_squashed(script):
    if script.classification() or "BCE" in script.text:
        return
    for call in script.loss_calls()[:1]:
        first = script.of(call.args[0])
        for name in ("torch.sigmoid", "torch.relu", "torch.tanh"):
            yield name, script.replaced((call.args[0], f"{name}({first})")), (call.lineno,), ("output-range",)


@operator
def detached_inside(script):
    for node in [n for n in ast.walk(script.tree) if isinstance(n, ast.FunctionDef) and n.name == "forward"]:
        for call in [n for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and script.of(n.func.value) == "self"]:
            parent = script.parents[call]
            if isinstance(parent, ast.Call) and call in parent.args and call.func.attr not in ("drop", "norm", "bn1", "bn2"):
                yield f"{call.func.attr} detached", script.replaced((call, f"{script.of(call)}.detach()")), (call.lineno,), \
                    ("graph-broken", "unused-module", "optimizer-wrong-params")


@operator
def batch_norm_momentum(script):
    calls = script.calls("BatchNorm1d", "BatchNorm2d")
    for value in ("1e-4", "1e-5") if calls else ():
        edits = [(c, f"{script.of(c)[:-1]}, momentum={value})") for c in calls]
        yield value, script.replaced(*edits), tuple(c.lineno for c in calls), ("batchnorm-misuse",)


@operator
def dropout_up(script):
    for value in ("0.95", "0.98"):
        calls = script.calls("Dropout")
        if calls:
            yield value, script.replaced(*((c.args[0], value) for c in calls)), tuple(c.lineno for c in calls), ("dropout-misuse",)
    for call in script.loss_calls()[:1]:
        if script.classification():
            yield "on the logits", script.replaced((call.args[0], f"nn.functional.dropout({script.of(call.args[0])}, 0.7)")), (call.lineno,), ("dropout-misuse",)


@operator
def axis_wrong(script):
    for call in script.calls("GRU", "LSTM"):
        old = keyword(call, "batch_first")
        if old is not None:
            yield "batch_first dropped", script.replaced((old.value, "False")), (call.lineno,), ("wrong-dim",)
    for call in script.loss_calls()[:1]:
        if script.classification():
            first = script.of(call.args[0])
            if ".flatten(" not in first:
                text = script.replaced((call, f"nn.functional.nll_loss(torch.log_softmax({first}, dim=0), {script.of(call.args[1])})"))
                yield "log_softmax over the batch", text, (call.lineno,), ("wrong-dim",)
            else:
                text = script.text.replace("mixed.transpose(1, 2).reshape(n, t, w)", "mixed.reshape(n, t, w)")
                yield "reshape for transpose", text, tuple(i for i, line in enumerate(script.lines, 1) if "mixed.transpose" in line), ("wrong-dim", "attention-mask")


@operator
def precision_low(script):
    model = script.model()
    if model is None or not isinstance(model.targets[0], ast.Name):
        return
    name, call = model.targets[0].id, script.optimizer()
    lr = keyword(call, "lr") if call is not None else None
    text = script.after(model, f"{name}.bfloat16()")
    inputs = "ids" if "Embedding" in script.text else None
    if inputs is None:
        text = re.sub(rf"(?<![\w.])(self\.model|{name})\(((?:[^()]|\([^()]*\))+)\)", r"\1(\2.bfloat16()).float()", text)
    if lr is not None and isinstance(lr.value, ast.Constant):
        for factor in (1.0, 0.05):
            yield f"bfloat16 weights, lr x{factor:g}", text.replace(f"lr={script.of(lr.value)}", f"lr={lr.value.value * factor!r}", 1), \
                (model.lineno, model.lineno + 1), ("low-precision-updates-lost",)
