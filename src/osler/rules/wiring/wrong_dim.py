from __future__ import annotations

from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import VIEWS, Op
from osler.core.window import Window
from osler.rules.axis_questions import RESHAPES, axis_of, moved_axis
from osler.rules.code_questions import constructions, quoted, spot
from osler.rules.graph_questions import CRITERIA, PERMUTING, Pass, change_line, module_name, modules, origin, passes

SEQUENCE_LAYERS = frozenset(("LSTM", "GRU", "RNN", "MultiheadAttention", "Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer",
                             "TransformerEncoder", "TransformerDecoder"))
PASS_ON = VIEWS | {"dropout"}


@rule("wrong-dim", "wiring")
def check(window: Window, *, effect: float = 1e-3) -> Iterator[Finding]:
    """An operation runs over the wrong axis.

    What it is: a softmax over the batch, an LSTM or attention that reads the batch as time (batch_first missing), a reshape where the
    axes should have been permuted, a position table added along the batch, classes on another axis than the loss reads.
    How it is seen: in a forked copy one sample of the batch is changed, and the outputs of others change (by more than `effect`,
    relative), or outputs do not follow when the samples change places; in the recorded program, axes and shapes of softmax, attention
    weights and reshapes.
    Why it matters: samples of a batch are strangers to each other: what one learns from them is noise, and at evaluation it is gone.
    What to do: name the axis (dim=1 or -1), set batch_first=True, use transpose or permute before view.
    When this is wrong: batch norm, graph inputs (square adjacency), sets and losses over pairs mix samples by design and are not reported;
    stacking neighbours by a reshape can look like a moved axis and is then only suspected.
    Source: torch issue 1538 (batch_first); the "backprop to chart dependencies" check of A. Karpathy, A Recipe for Training Neural
    Networks (2019).
    """
    found = next((f for source in (softmaxes, classes_last, weights, reshaped) for f in source(window)), None)
    mixing = next(mixed(window, effect), None)
    if mixing is not None and (found is None or found.certainty == "suspected"):
        found = mixing
    if found is not None:
        yield found


def mixed(window: Window, effect: float) -> Iterator[Finding]:
    for fact in window.facts("experiment"):
        if fact.get("name") != "batch-mixing" or fact.get("square_input") or fact.get("square_output") or fact.get("unclear") or fact.get("kind") in ("batch_norm", "dropout", "random"):
            continue
        if by_relation(window, fact):
            continue
        strong = fact.get("mixed") and float(fact.get("effect") or 0.0) > effect
        if not (strong or fact.get("inside") or fact.get("order") is False):
            continue
        place, layer = layer_line(window, fact)
        op, kind = str(fact.get("first_op")), str(fact.get("first_class") or "")
        sequence = kind in SEQUENCE_LAYERS
        if fact.get("order") is False and not fact.get("mixed"):
            title = "outputs depend on a sample's place in the batch: something is added along the batch axis"
            cure = f"Add it along the time axis at {quoted(window, place, op)} (shape [1, time, features] for batch-first tensors)."
        elif sequence:
            title = f"{kind} reads the batch axis as time: samples of a batch influence each other"
            cure = f"Pass batch_first=True at {quoted(window, place, kind)} (or hand it time-first tensors)."
        else:
            title = f"samples of a batch influence each other through {op}"
            cure = f"Let {quoted(window, place, op)} run over an axis within each sample, not over the batch (axis 0)."
        size = float(fact.get("effect") or 0.0)
        what = (f"changing one of {fact.get('samples')} samples changed the output of others by {size:.2g} (relative)" if strong else
                f"changing one of {fact.get('samples')} samples reached the others inside {op} and not even its own output" if fact.get("inside") else
                f"the outputs of {fact.get('samples')} samples did not follow when the samples changed places")
        guess = fact.get("axis_by") == "assumed"  # nothing says that the first axis counts samples
        yield Finding("wrong-dim", "suspected" if guess else "certain" if sequence else "measured", "note" if guess else "harmful", title, cure, Where.at(place, module=layer, also=(str(fact.at),) if fact.at and fact.at != place else ()),
                      first_step=0, evidence=(Evidence(what + " in a forked copy", "experiment/batch-mixing", value=size, threshold=effect, samples=int(fact.get("samples") or 0)),),
                      explains=("loss-plateau", "eval-mode-missing"))


def by_relation(window: Window, fact: Fact) -> bool:
    """The operation that mixes takes a given relation between samples: a square matrix of constants, or index tensors (graphs, sets)."""
    for trace in window.traces:
        for op in trace.named(str(fact.get("first_op"))):
            if op.at is None or fact.at is None or (op.at.file, op.at.line) != (fact.at.file, fact.at.line):
                continue
            given = [trace.tensors[t] for t in op.ins if not trace.tensors[t].requires_grad]
            if fact.get("kind") == "matmul" and any(len(t.shape) >= 2 and t.shape[-1] == t.shape[-2] > 2 for t in given):
                return True
            if fact.get("kind") in ("order", "other") and len(op.ins) > 1 and any("int" in t.dtype for t in given):
                return True
    return False


def layer_line(window: Window, fact: Fact) -> tuple[Location | None, str | None]:
    kind = str(fact.get("first_class") or "")
    if kind not in SEQUENCE_LAYERS:
        return fact.at or spot(fact.get("module_at")), fact.get("first_module") or None
    lines = constructions(window, kind)
    at = spot(fact.get("module_at"))
    if len(lines) == 1 or (lines and at is None):
        return lines[0], fact.get("first_module")
    return at or fact.at, fact.get("first_module")


def said(window: Window, op: Op, place: Location | None, title: str, cure: str, evidence: str, certainty: str = "certain", module: str | None = None) -> Finding:
    return Finding("wrong-dim", certainty, "harmful", title, cure.format(line=quoted(window, place, op.name)), Where.at(place, module=module), first_step=op.step,
                   evidence=(Evidence(evidence, "trace"),), explains=("loss-plateau", "loss-scale"))


def softmaxes(window: Window) -> Iterator[Finding]:
    """A softmax over axis 0 whose output the loss reads with classes on axis 1."""
    known = modules(window)
    for run in passes(window):
        for op in run.operations:
            if op.name not in CRITERIA or not op.ins:
                continue
            source, views = origin(run.trace, op.ins[0], op.index)
            shape = run.trace.tensors[source.ins[0]].shape if source is not None and source.ins else ()
            if source is None or source.name not in ("softmax", "log_softmax") or len(shape) < 2 or any(v.name in PERMUTING for v in views):
                continue
            if axis_of(source, run.trace.tensors[source.ins[0]]) == 0 and shape[0] > 1:
                place = change_line(known, source, ("Softmax", "LogSoftmax"))
                yield said(window, source, place, f"{source.name} runs over the batch axis", "Write dim=1 (or -1) in {line}.",
                           f"{source.name} over axis 0 of {list(shape)} feeds {op.name}: probabilities sum to 1 over the {shape[0]} samples, not over the classes",
                           module=module_name(known, source.module))
        yield from by_hand(window, run)


def by_hand(window: Window, run: Pass) -> Iterator[Finding]:
    """log_softmax over axis 0 of a non-square [batch, classes], then multiplied with targets or picked from by labels."""
    for op in run.operations:
        if op.name not in ("mul", "gather") or len(op.ins) < 2:
            continue
        for mine, other in ((op.ins[0], op.ins[1]), (op.ins[1], op.ins[0])):
            source, views = origin(run.trace, mine, op.index)
            if source is None or source.name != "log_softmax" or run.trace.tensors[other].requires_grad or any(v.name in PERMUTING for v in views) or not source.ins:
                continue
            shape = run.trace.tensors[source.ins[0]].shape
            if len(shape) == 2 and shape[0] != shape[1] and min(shape) > 1 and axis_of(source, run.trace.tensors[source.ins[0]]) == 0:
                yield said(window, source, source.at, "log_softmax runs over the batch axis", "Write dim=1 (or -1) in {line}.",
                           f"log_softmax over axis 0 of {list(shape)} meets the targets: probabilities sum to 1 over the samples, not over the classes")


def classes_last(window: Window) -> Iterator[Finding]:
    """cross_entropy reads classes on axis 1, and a linear layer has put them on the last of three."""
    for run in passes(window):
        for op in run.operations:
            if op.name != "cross_entropy" or not op.ins:
                continue
            shape = run.trace.tensors[op.ins[0]].shape
            source, views = origin(run.trace, op.ins[0], op.index)
            if len(shape) >= 3 and source is not None and source.name == "linear" and all(v.name in ("clone", "float", "contiguous", "to") for v in views):
                yield said(window, op, op.at, "cross_entropy takes the softmax over time: the classes are on the last axis", "Pass logits.transpose(1, 2) (or flatten both) in {line}.",
                           f"the input {list(shape)} comes from a linear layer, whose outputs are on the last axis; cross_entropy reads classes on axis 1")


def weights(window: Window) -> Iterator[Finding]:
    """Attention weights normalised over another axis than the one they are summed over."""
    for run in passes(window):
        for op in run.operations:
            if op.name not in ("matmul", "bmm") or len(op.ins) != 2:
                continue
            source, views = origin(run.trace, op.ins[0], op.index, frozenset(PASS_ON))
            if source is None or source.name != "softmax" or not source.ins or any(v.name not in ("dropout", "clone", "contiguous", "to", "float") for v in views):
                continue
            shape = run.trace.tensors[source.ins[0]].shape
            axis = axis_of(source, run.trace.tensors[source.ins[0]])
            if len(shape) >= 3 and axis is not None and axis != len(shape) - 1:
                yield said(window, source, source.at, f"attention weights sum to 1 over axis {axis}, and are summed over axis {len(shape) - 1}", "Write softmax(dim=-1) in {line}.",
                           f"softmax over axis {axis} of {list(shape)}, then a matrix product over the last axis")


def reshaped(window: Window) -> Iterator[Finding]:
    """view or reshape between shapes that only a permutation would connect."""
    doubtful = None
    for run in passes(window):
        for op in run.operations:
            if op.name not in RESHAPES or not op.ins or not op.outs or op.at is None:
                continue
            before, after = run.trace.tensors[op.ins[0]].shape, run.trace.tensors[op.outs[0]].shape
            found = moved_axis(before, after)
            if found is None:
                continue
            size, sure = found
            finding = said(window, op, op.at, f"{op.name} from {list(before)} to {list(after)} does not move the axis of size {size}: it scrambles the values",
                           "Use transpose or permute before (or in place of) {line}.",
                           f"{op.name} keeps the order in memory; to bring the axis of size {size} to its new place takes a permutation", "certain" if sure else "suspected")
            if sure:
                yield finding
                return
            doubtful = doubtful or finding
    if doubtful is not None:
        yield doubtful
