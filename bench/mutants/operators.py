"""Mutation operators: one small fault each, edited into the source of a healthy script.

An operator is a function from a ``Script`` to mutants. It edits text at positions that the syntax tree gives, so that everything
else stays as its author wrote it. The kinds follow DeepCrime (Humbatova et al., ISSTA 2021), extended by what its Keras subjects
cannot express: the order of calls in the loop, registration, masks and axes, clipping, precision.

Each mutant names the causes that are right for it: the first is the fault itself, the others are declared equivalents, the same
change seen from another side (a loss summed instead of averaged *is* a learning rate that is too high).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")
LOSSES = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")
LOSS_CLASSES = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss")


@dataclass(frozen=True, slots=True)
class Mutant:
    operator: str
    variant: str
    source: str
    lines: tuple[int, ...]
    causes: tuple[str, ...]


class Script:
    """Source of a healthy script, its tree, and the questions that operators ask about it."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    # -- looking -----------------------------------------------------------------------------------------------

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls whose last name is one of ``names``, in order of the text."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and last_name(n.func) in names]
        return sorted(found, key=lambda n: (n.lineno, n.col_offset))

    def statements(self, method: str, receiver: str = "") -> list[ast.Expr]:
        """Statements that only call ``….method(…)`` on something whose name matches ``receiver``."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and isinstance(n.value.func, ast.Attribute)
                and n.value.func.attr == method and re.search(receiver, self.of(n.value.func.value))]

    def steps(self) -> list[ast.Expr]:
        return [s for s in self.statements("step") if "sched" not in self.of(s)]

    def assigned(self, name: str) -> list[ast.Assign]:
        """Assignments at module level to ``name`` (also within a tuple)."""
        return [n for n in self.tree.body if isinstance(n, ast.Assign) and name in [t.id for t in ast.walk(n.targets[0]) if isinstance(t, ast.Name)]]

    def classification(self) -> bool:
        return "cross_entropy(" in self.text or "CrossEntropyLoss" in self.text

    def model(self) -> ast.Assign | None:
        """The statement that builds the model that is trained."""
        for name in ("model", "net"):
            if found := self.assigned(name):
                return found[0]
        return None

    def optimizer(self) -> ast.Call | None:
        return next(iter(self.calls(*OPTIMIZERS)), None)

    def loss_calls(self) -> list[ast.Call]:
        """Calls of the criterion that a backward follows: ``loss = criterion(…)``."""
        names = {t.id for n in ast.walk(self.tree) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and last_name(n.value.func) in LOSS_CLASSES
                 for t in n.targets if isinstance(t, ast.Name)}
        names |= {t.attr for n in ast.walk(self.tree) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and last_name(n.value.func) in LOSS_CLASSES
                  for t in n.targets if isinstance(t, ast.Attribute)}
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "loss" and isinstance(node.value, ast.Call) \
                    and (last_name(node.value.func) in LOSSES or last_name(node.value.func) in names):
                found.append(node.value)
        return found

    def data(self, which: str) -> ast.Assign | None:
        """The last statement at module level that sets ``x_train``, ``y_train`` …, before the model is built."""
        model = self.model()
        found = [n for n in self.assigned(which) if model is None or n.lineno < model.lineno or model is None]
        return found[-1] if found else None

    def of(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    # -- editing -----------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        def at(line: int, column: int) -> int:
            return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def replaced(self, *edits: tuple[ast.AST, str]) -> str:
        text = self.text
        for node, new in sorted(edits, key=lambda edit: -self.span(edit[0])[0]):
            start, end = self.span(node)
            text = text[:start] + new + text[end:]
        ast.parse(text)
        return text

    def after(self, statement: ast.stmt, *new: str) -> str:
        """New statements behind ``statement``, at its indentation."""
        indent = " " * statement.col_offset
        end = self.starts[statement.end_lineno or statement.lineno]
        text = self.text[:end] + "".join(f"{indent}{line}\n" for line in new) + self.text[end:]
        ast.parse(text)
        return text


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((k for k in call.keywords if k.arg == name), None)


def with_keyword(script: Script, call: ast.Call, name: str, value: str) -> str:
    """The source with this keyword of the call set."""
    old = keyword(call, name)
    if old is not None:
        return script.replaced((old.value, value))
    whole = script.of(call)
    return script.replaced((call, f"{whole[:-1].rstrip().rstrip(',')}{', ' if call.args or call.keywords else ''}{name}={value})"))


Operator = Callable[[Script], Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]]
OPERATORS: dict[str, Operator] = {}


def operator(function: Operator) -> Operator:
    OPERATORS[function.__name__.replace("_", "-")] = function
    return function


def mutants(script: Script) -> list[Mutant]:
    found = []
    for name, function in OPERATORS.items():
        for variant, source, lines, causes in function(script):
            if source != script.text:
                found.append(Mutant(name, variant, source, lines, causes))
    return found


# -- learning rate and optimizer -----------------------------------------------------------------------------------


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


# -- the order of calls --------------------------------------------------------------------------------------------


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


# -- losses --------------------------------------------------------------------------------------------------------


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


# -- the model -----------------------------------------------------------------------------------------------------


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


# -- data ----------------------------------------------------------------------------------------------------------


def _after_data(script: Script, *new: str) -> tuple[str, int] | None:
    """Statements behind the last one that prepares the training rows."""
    found = [d for d in (script.data("x_train"), script.data("y_train")) if d is not None]
    if not found:
        return None
    last = max(found, key=lambda n: n.lineno)
    return script.after(last, *new), (last.end_lineno or last.lineno) + 1


def _supervised(script: Script) -> bool:
    return script.data("y_train") is not None


@operator
def labels_noised(script):
    if _supervised(script):
        for share in (0.5, 0.8):
            made = _after_data(script, f"y_train = torch.where(torch.rand(len(y_train)) < {share}, y_train[torch.randperm(len(y_train))], y_train)")
            if made is not None:
                yield f"{share:g} of them", made[0], (made[1],), ("label-noise", "label-misaligned")


@operator
def labels_shuffled(script):
    if _supervised(script):
        made = _after_data(script, "y_train = y_train[torch.randperm(len(y_train))]")
        if made is not None:
            yield "labels only", made[0], (made[1],), ("label-misaligned", "label-noise")
        made = _after_data(script, "x_train = x_train[torch.randperm(len(x_train))]")
        if made is not None:
            yield "inputs only", made[0], (made[1],), ("label-misaligned", "label-noise")


@operator
def labels_shifted(script):
    if _supervised(script):
        for by in (1, -1):
            made = _after_data(script, f"y_train = torch.roll(y_train, {by}, 0)")
            if made is not None:
                yield f"by {by}", made[0], (made[1],), ("label-misaligned", "label-noise")


@operator
def sorted_without_shuffle(script):
    if _supervised(script):
        made = _after_data(script, "by_label = torch.argsort(y_train); x_train, y_train = x_train[by_label], y_train[by_label]")
        if made is not None:
            text = made[0].replace("shuffle=True", "shuffle=False")
            model = script.model()
            assert model is not None
            head, tail = text[:script.span(model)[0]], text[script.span(model)[0]:]
            tail = re.sub(r"torch\.randperm\((len\([^)]*\))\)", r"torch.arange(\1)", tail)
            text = head + tail
            text = re.sub(r"for index in torch\.randperm\((len\([^)]*\))\)", r"for index in torch.arange(\1)", text)
            yield "by label", text, (made[1], *(i for i, line in enumerate(text.splitlines(), 1) if "shuffle=False" in line or ".arange(len(" in line)), ("no-shuffle-sorted",)


@operator
def inputs_scaled(script):
    for factor in (300, 10000):
        made = _after_data(script, f"x_train, x_val = x_train * {factor}, x_val * {factor}") if script.data("x_val") is not None else None
        if made is not None and "images" not in script.name:
            yield f"x{factor}", made[0], (made[1],), ("input-scale", "lr-too-high", "bad-init", "target-scale")


@operator
def validation_differs(script):
    for line in ("x_val = x_val * 8", "x_val = x_val * 3 + 4"):
        made = _after_data(script, line) if script.data("x_val") is not None else None
        if made is not None:
            yield line, made[0], (made[1],), ("val-preprocessing-mismatch",)


@operator
def targets_scaled(script):
    if _supervised(script) and not script.classification() and "BCE" not in script.text:
        for factor in (100, 1000, 100000):
            made = _after_data(script, f"y_train, y_val = y_train * {factor} + {factor}, y_val * {factor} + {factor}")
            if made is not None:
                yield f"x{factor}", made[0], (made[1],), ("target-scale",)


@operator
def rows_lost(script):
    for call in script.calls("DataLoader"):
        size, shuffled = keyword(call, "batch_size"), keyword(call, "shuffle")
        if size is not None and shuffled is not None:
            for batch in (1024, 4096):
                whole = script.of(call).replace(f"batch_size={script.of(size.value)}", f"batch_size={batch}")[:-1]
                yield f"drop_last of {batch} rows", script.replaced((call, f"{whole}, drop_last=True)")), (call.lineno,), ("drop-last-data-loss", "step-missing-or-rare")


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
