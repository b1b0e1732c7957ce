from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op, Trace
from osler.core.window import Window
from osler.rules.code_questions import nodes, quoted, spot
from osler.rules.graph_questions import CRITERIA, Pass, change_line, module_name, modules, passes

CHANGED = ("modified by an inplace operation", "a leaf Variable that requires grad is being used in an in-place operation",
           "a view of a leaf Variable that requires grad is being used in an in-place operation")
FILLS = frozenset(("copy_", "fill_", "zero_", "set_", "resize_", "requires_grad_", "detach_", "random_", "normal_", "uniform_", "bernoulli_"))
AUGMENTED = re.compile(r"(?<![=<>!])[-+*/]=(?!=)")


@rule("inplace-mutation", "wiring")
def check(window: Window, *, effect: float = 1e-6) -> Iterator[Finding]:
    """Data or parameters are changed in place by mistake.

    What it is: a normalisation in forward that writes into the stored training data (and acts again in the next epoch), a transform
    that edits the dataset's own array, a corrupted input that is also the target, a value that autograd still needed.
    How it is seen: in a forked copy the model is run on a batch, and the batch differs afterwards although it is a view of stored data; the
    same dataset item, asked for twice, differs; in the recorded program, the tensor written in place is both input and target; or
    torch's exception.
    Why it matters: the values shrink or shift a little more at every pass; a denoiser whose target was corrupted too learns to copy.
    What to do: x = (x - mean) / std in place of sub_ and div_; clone before changing.
    When this is wrong: replay buffers, running averages, clamped weights and activations made by the model itself are written in place on
    purpose and are not reported; nor is a batch that nobody uses again.
    Source: torch issue 1112 (in-place correctness checks); torchvision issues 517 and 680.
    """
    found = next(refused(window), None) or next(written_data(window, effect), None) or next(edited_items(window), None) or next(corrupted_target(window), None)
    if found is not None:
        yield found


def claim(place: Location | None, severity: str, title: str, fix: str, evidence: Evidence, step: int, module: str | None = None, also: tuple[str, ...] = ()) -> Finding:
    return Finding("inplace-mutation", "certain", severity, title, fix, Where.at(place, module=module, also=also), first_step=step, evidence=(evidence,),
                   explains=("input-scale", "overfit", "loss-plateau", "script-failed"))


def refused(window: Window) -> Iterator[Finding]:
    for fact in window.facts("exception"):
        message = str(fact.get("message"))
        if not any(m in message for m in CHANGED):
            continue
        frames = [p for p in map(spot, fact.get("frames") or ()) if p is not None]
        place = fact.at or (frames[0] if frames else None)
        op = None
        if CHANGED[0] in message:
            known = modules(window)
            op = last_write(window, message)
            place = (change_line(known, op, ()) if op is not None else None) or place
        what = "a tensor that backward needs was changed in place" if CHANGED[0] in message else "a parameter is changed in place under autograd"
        yield claim(place, "fatal", what, f"Use the operation that makes a new tensor at {quoted(window, place, 'this line')}" + (" (or torch.no_grad() for an update by hand)." if op is None else "."),
                    Evidence(f"{fact.get('type')}: {message[:200]}", "exception"), fact.step, also=(str(fact.at),) if fact.at is not None and fact.at != place else ())


def last_write(window: Window, message: str) -> Op | None:
    """The last in-place write of user code on a tensor of the graph, of the shape that the exception names if it names one."""
    named = re.search(r"\[torch\.\w*Tensor \[([\d, ]*)\]\]", message)
    shape = tuple(int(d) for d in named[1].replace(" ", "").split(",") if d) if named else None
    for trace in reversed(window.traces):
        for op in reversed(trace.ops):
            if op.in_place and op.at is not None and op.name not in ("requires_grad_", "detach_", "zero_"):
                written = trace.tensors[op.outs[0]]
                if (written.requires_grad or op.grad) and (shape is None or written.shape == shape):
                    return op
    return None


def written_data(window: Window, effect: float) -> Iterator[Finding]:
    """Running the model changed its input, and the input is a view of stored data (or is written again and again)."""
    for fact in window.facts("experiment"):
        if fact.get("name") != "input-mutated" or not fact.get("mutated") or float(fact.get("effect") or 0.0) <= effect:
            continue
        stored = bool(fact.get("view"))
        yield claim(fact.at or spot(fact.get("module_at")), "harmful" if stored else "note",
                    f"forward changes its input in place ({fact.get('first_op')})" + (", and the input is a slice of the stored data" if stored else ""),
                    f"Compute a new tensor at {quoted(window, fact.at, str(fact.get('first_op')))}, or clone the input first.",
                    Evidence(f"after one pass in a forked copy the batch had changed by {float(fact['effect']):.2g} (relative)" + ("; it is a view of a larger tensor, so every pass changes the data again" if stored else ""),
                             "experiment/input-mutated", value=float(fact["effect"]), threshold=effect, samples=1), 0, module=fact.get("first_module") or fact.get("first_class"))
    for trace in window.traces:
        yield from rewritten(window, trace)


def rewritten(window: Window, trace: Trace) -> Iterator[Finding]:
    """Arithmetic in place on a tensor that was there before, is no parameter, and enters a layer; in two steps or inside forward."""
    known = modules(window)
    by_storage: dict[int, list[Op]] = {}
    learned = {trace.tensors[t].storage for op in trace.ops for t in op.outs if trace.tensors[t].requires_grad}
    old = {t.storage for t in trace.tensors if t.old and t.uid < 0 and not t.requires_grad}
    for op in trace.ops:
        if op.in_place and op.name.endswith("_") and op.name not in FILLS | {"setitem_", "clamp_", "relu_"} and op.at is not None and not op.name.startswith("@"):
            storage = trace.tensors[op.outs[0]].storage
            if storage in old and storage not in learned and not any(trace.tensors[t].requires_grad for t in op.ins):
                by_storage.setdefault(storage, []).append(op)
    for storage, ops in by_storage.items():
        first = ops[0]
        if len({op.step for op in ops}) >= 2 and len({str(op.at) for op in ops}) <= 4 and enters_layer(trace, storage, first):
            yield claim(first.at, "harmful", f"{first.name} writes into stored data that the model reads, again in every step",
                        f"Compute a new tensor at {quoted(window, first.at, first.name)}, or clone the batch first.",
                        Evidence(f"{len(ops)} in-place operations on the same memory in {len({op.step for op in ops})} steps, and layers read it", "trace", value=float(len(ops)), samples=len(ops)),
                        first.step, module=module_name(known, first.module))
            return


def enters_layer(trace: Trace, storage: int, since: Op) -> bool:
    """A view of the memory is the data operand of an operation with parameters, and larger than one row."""
    return any(op.index > since.index and any(trace.tensors[t].storage == storage and len(trace.tensors[t].shape) >= 2 for t in op.ins)
               and any(trace.tensors[t].uid >= 0 for t in op.ins) for op in trace.ops)


def edited_items(window: Window) -> Iterator[Finding]:
    """`__getitem__` gives another item the second time, and its source writes in place."""
    loaders = {f.get("index"): f for f in window.facts("loader")}
    for fact in window.facts("experiment"):
        if fact.get("name") != "item-repeat" or fact.get("same") is not False or fact.get("random"):
            continue
        loader = loaders.get(fact.get("loader"))
        getter = spot(loader.get("dataset_at")) if loader is not None else None
        place = writing_line(window, getter)
        if place is not None:
            yield claim(place, "harmful", "__getitem__ changes the dataset in place: the same index gives another value each time", f"Copy the row before changing it at {quoted(window, place, 'this line')}.",
                        Evidence(f"the same item asked for twice differs by {fact.get('change')} with the same random state", "experiment/item-repeat", value=fact.get("change"), threshold=0.0,
                                 samples=int(fact.get("items") or 1)), 0, module=fact.get("dataset"))


def writing_line(window: Window, getter: Location | None) -> Location | None:
    if getter is None:
        return None
    inside = [(at, n) for at, n in nodes(window, lambda n: isinstance(n, ast.FunctionDef) and n.name == "__getitem__") if at.file == getter.file]
    for _, function in inside:
        if not (getattr(function, "lineno", 0) - 2 <= getter.line <= (getattr(function, "end_lineno", 0) or 0)):
            continue
        for node in ast.walk(function):
            text = window.line(getter.file, getattr(node, "lineno", 0))
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_") and not node.func.attr.startswith("_")
            write = isinstance(node, ast.Assign) and any(isinstance(t, ast.Subscript) for t in node.targets)
            if isinstance(node, ast.AugAssign) or call or write or (isinstance(node, ast.stmt) and AUGMENTED.search(text) and not isinstance(node, ast.FunctionDef | ast.For | ast.If)):
                return Location(getter.file, int(getattr(node, "lineno", getter.line)), "__getitem__")
    return None


def corrupted_target(window: Window) -> Iterator[Finding]:
    """Noise or a mask is written into a tensor that then is both the model's input and the loss's target."""
    for run in passes(window):
        trace = run.trace
        for op in trace.ops[run.start: run.backward.index]:
            if not op.in_place or op.at is None or trace.tensors[op.outs[0]].requires_grad or trace.tensors[op.outs[0]].uid >= 0 or op.name in FILLS - {"copy_"}:
                continue
            written = trace.tensors[op.outs[0]].storage
            if (op.name in ("setitem_", "masked_fill_") or len(op.ins) > 1) and target_of(run, written, op) and enters_layer(trace, written, op):
                yield claim(op.at, "harmful", f"{op.name} corrupts the target together with the input: both are the same tensor", f"Clone the tensor before {quoted(window, op.at, op.name)}.",
                            Evidence("the memory written in place is read by a layer and by the loss as its target, without a copy in between", "trace"), op.step)
                return


def target_of(run: Pass, storage: int, since: Op) -> bool:
    return any(op.name in CRITERIA and op.index > since.index and len(op.ins) > 1 and run.trace.tensors[op.ins[1]].storage == storage for op in run.operations)
