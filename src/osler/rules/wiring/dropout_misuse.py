from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op
from osler.core.window import Window
from osler.rules.code_questions import calls_at, dotted, quoted, spot
from osler.rules.graph_questions import CRITERIA, Pass, change_line, module_name, modules, origin, passes

DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"))
CLASSES = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout")


@rule("dropout-misuse", "wiring")
def check(window: Window, *, strong: float = 0.9, weak: float = 0.05) -> Iterator[Finding]:
    """Dropout on the outputs, too strong, or active in evaluation by construction.

    What it is: dropout between the last layer and the loss; p near 1 (a keep probability passed as p); functional dropout without
    `training=self.training`, or a Dropout module constructed inside forward, which both never switch off.
    How it is seen: the operation that made the loss's input in the recorded program; p of the modules (above `strong`); the call's
    arguments in the source.
    Why it matters: zeroed scores set a floor to the training loss; dropout at evaluation makes every result noisy.
    What to do: dropout before the last layer, p of 0.1 to 0.5, `F.dropout(x, p, self.training)` or an nn.Dropout made in __init__.
    When this is wrong: sampling with dropout at evaluation (Monte Carlo dropout) switches modules on by hand and is not reported;
    p below `weak` on outputs is a note.
    Source: torch issue 13659; char-rnn issue 160.
    """
    found = next((f for run in passes(window) for f in on_outputs(window, run, weak)), None) or next(always_on(window), None) or next(too_strong(window, strong), None)
    if found is not None:
        yield found


def on_outputs(window: Window, run: Pass, weak: float) -> Iterator[Finding]:
    known = modules(window)
    for op in run.operations:
        if op.name not in CRITERIA or not op.ins:
            continue
        source, _ = origin(run.trace, op.ins[0], op.index)
        if source is None or source.name not in DROPOUTS or not active(source):
            continue
        p = float(source.kw.get("p", 0.5) if isinstance(source.kw.get("p", 0.5), int | float) else 0.5)
        place = change_line(known, source, CLASSES)
        yield Finding(
            "dropout-misuse", "certain", "harmful" if p > weak else "note", f"dropout with p={p:g} is applied to the outputs that {op.name} reads",
            f"Move {quoted(window, place, 'the dropout')} before the last layer.", Where.at(place, module=module_name(known, source.module), also=(str(op.at),) if op.at else ()), first_step=op.step,
            evidence=(Evidence(f"the input of {op.name} is the output of {source.name}: {p:.0%} of the scores are 0 in every training step", "trace/dropout", value=p, threshold=weak),),
            treatment="dropout-off", explains=("loss-plateau",))


def active(op: Op) -> bool:
    return bool(op.kw.get("training", True)) and op.kw.get("p", 0.5) not in (0, 0.0)


def always_on(window: Window) -> Iterator[Finding]:
    """Dropout calls that nothing switches off."""
    evaluated = any(f.get("kind") == "validation" for f in window.facts("phase"))
    for trace in window.traces:
        for op in trace.named(*DROPOUTS, "scaled_dot_product_attention", "multi_head_attention_forward"):
            how = unconditional(window, op)
            if how:
                yield Finding(
                    "dropout-misuse", "certain", "harmful" if evaluated else "note", f"{how}: it stays active after model.eval()",
                    f"Make {quoted(window, op.at, op.name)} depend on self.training.", Where.at(op.at, module=module_name(modules(window), op.module)), first_step=op.step,
                    evidence=(Evidence(f"{op.name} runs in training with nothing in its call that refers to the training mode", "trace/dropout",
                                       value=float(op.kw.get("p", op.kw.get("dropout_p", 0.5)) or 0.5), threshold=0.0),),
                    treatment="dropout-off", explains=("val-augmented", "nondeterminism"))


def unconditional(window: Window, op: Op) -> str:
    for call in calls_at(window, op.at):
        name = dotted(call.func).split(".")[-1]
        text = ast.unparse(call)
        if "training" in text or window.line(op.at.file, op.at.line).lower().count("mc") if op.at else True:
            continue
        if op.name in DROPOUTS and name in DROPOUTS and len(call.args) < 3 and dotted(call.func).split(".")[0] != "self" and active(op):
            return "functional dropout without a training argument"
        if op.name in DROPOUTS and isinstance(call.func, ast.Call) and dotted(call.func.func).split(".")[-1] in CLASSES:
            return "a Dropout module constructed where it is used is always in training mode"
        rate = next((k.value for k in call.keywords if k.arg == "dropout_p"), None)
        if op.name == "scaled_dot_product_attention" and name == op.name and isinstance(rate, ast.Constant | ast.Attribute | ast.Name) and op.kw.get("dropout_p"):
            return "scaled_dot_product_attention with a fixed dropout_p" if fixed(window, rate, op.at) else ""
    return ""


def fixed(window: Window, rate: ast.expr, at: Location | None) -> bool:
    """A constant or an attribute; a local name may have been set according to the training mode."""
    return isinstance(rate, ast.Constant | ast.Attribute)


def too_strong(window: Window, strong: float) -> Iterator[Finding]:
    for m in modules(window).values():
        p = (m.get("attrs") or {}).get("p")
        if m["class"] not in CLASSES or not isinstance(p, int | float) or p < min(strong, 0.8):
            continue
        place = spot(m.get("at"))
        yield Finding(
            "dropout-misuse", "certain", "fatal" if p >= 1 else "harmful" if p >= strong else "note", f"dropout with p={p:g} zeroes {p:.0%} of its inputs",
            f"Lower p at {quoted(window, place, 'the layer')}: torch's p is the share to drop, not to keep.", Where.at(place, module=m["name"]), first_step=0,
            evidence=(Evidence(f"{m['name']} has p={p:g}", "modules/p", value=float(p), threshold=strong),), treatment="dropout-off", explains=("loss-plateau",))
        return
