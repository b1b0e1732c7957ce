"""Faults of the loss, and numbers that are not finite."""

from __future__ import annotations

import ast

from script import LOSS_CLASSES, LOSSES, last_name, operator, with_keyword


@operator
def activation_doubled(script):
    for call in script.loss_calls()[:1]:
        first = script.of(call.args[0])
        if script.classification():
            yield "softmax", script.replaced((call.args[0], f"torch.softmax({first}, 1)")), (call.lineno,), ("double-activation",)
            yield "log of softmax", script.replaced((call.args[0], f"torch.sigmoid({first})")), (call.lineno,), ("double-activation", "output-range")
        elif "BCEWithLogits" in script.text:
            yield "sigmoid", script.replaced((call.args[0], f"torch.sigmoid({first})")), (call.lineno,), ("double-activation",)


@operator
def loss_replaced(script):
    if "F.cross_entropy(" in script.text:
        text = script.text.replace("F.cross_entropy(", "F.nll_loss(", 1)
        yield "nll_loss", text, tuple(c.lineno for c in script.calls("cross_entropy")[:1]), ("loss-expects-log-probs",)
    for call in script.calls("CrossEntropyLoss"):
        yield "NLLLoss", script.replaced((call.func, script.of(call.func).replace("CrossEntropyLoss", "NLLLoss"))), \
            (call.lineno, *(c.lineno for c in script.loss_calls())), ("loss-expects-log-probs",)
    for call in script.calls("BCEWithLogitsLoss"):
        yield "MSELoss on logits", script.replaced((call.func, script.of(call.func).replace("BCEWithLogitsLoss", "MSELoss"))), (call.lineno,), ("loss-head-mismatch",)


@operator
def loss_negated(script):
    for call in script.loss_calls()[:1]:
        yield "minus", script.replaced((call, f"-{script.of(call)}")), (call.lineno,), ("loss-sign",)


@operator
def loss_scaled(script):
    for call in script.loss_calls()[:1]:
        whole = script.of(call)
        if "SGD(" in script.text:
            yield "x200", script.replaced((call, f"200 * {whole}")), (call.lineno,), ("loss-scale", "lr-too-high")
            yield "x1e-4", script.replaced((call, f"1e-4 * {whole}")), (call.lineno,), ("loss-scale", "lr-too-low")
        if last_name(call.func) in LOSSES:
            yield "sum", with_keyword(script, call, "reduction", '"sum"'), (call.lineno,), ("loss-scale", "lr-too-high")
    for call in script.calls(*LOSS_CLASSES):
        yield "sum", with_keyword(script, call, "reduction", '"sum"'), (call.lineno, *(c.lineno for c in script.loss_calls())), ("loss-scale", "lr-too-high")


@operator
def prediction_broadcast(script):
    for call in script.loss_calls()[:1]:
        for node in [n for n in ast.walk(script.tree) if isinstance(n, ast.Call) and last_name(n.func) == "squeeze" and n.args]:
            training = node.lineno in (call.lineno, call.lineno - 1)
            if training and isinstance(node.func, ast.Attribute):
                yield "squeeze dropped", script.replaced((node, script.of(node.func.value))), (node.lineno, call.lineno), ("shape-broadcast",)
    for call in script.loss_calls()[:1]:
        if not script.classification() and "binary" not in script.text.lower() and "y_train" in script.text:
            second = script.of(call.args[1])
            yield "target with an axis more", script.replaced((call.args[1], f"{second}.unsqueeze(-1)")), (call.lineno,), ("shape-broadcast",)


@operator
def logarithm_of_zero(script):
    for call in script.loss_calls()[:1]:
        first, second = script.of(call.args[0]), script.of(call.args[1])
        if script.classification() and ".flatten(" not in script.of(call):
            text = script.replaced((call, f"-torch.log(torch.softmax(60 * {first}, 1).gather(1, {second}[:, None])).mean()"))
            yield "log of a softmax that underflows", text, (call.lineno,), ("log-of-zero", "loss-scale", "lr-too-high")
            text = script.replaced((call, f"-(nn.functional.one_hot({second}, {first}.shape[1]) * torch.log(torch.relu({first}))).sum(1).mean()"))
            yield "log of a relu", text, (call.lineno,), ("log-of-zero", "output-range", "singular-gradient")
        elif "BCEWithLogits" in script.text:
            text = script.replaced((call, f"-({second} * torch.log(torch.sigmoid(60 * {first})) + (1 - {second}) * torch.log(1 - torch.sigmoid(60 * {first}))).mean()"))
            yield "log of a sigmoid that saturates", text, (call.lineno,), ("log-of-zero", "loss-scale", "lr-too-high")


@operator
def division_by_zero(script):
    for call in script.loss_calls()[:1]:
        whole, first = script.of(call), script.of(call.args[0])
        yield "by an empty mask", script.replaced((call, f"{whole} * 1.0 / ({first}.detach() > 1e9).sum()")), (call.lineno,), ("division-by-zero",)
