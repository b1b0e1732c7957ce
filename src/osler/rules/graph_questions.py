"""Questions that rules ask of the recorded program: modules and parameters by id, what a loss depends on, where a
gradient ends. The autograd side comes from facts, the dataflow from traces; nothing here judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from osler.core.facts import Fact, Location
from osler.core.trace import CUTS, VIEWS, Op, Trace
from osler.core.window import Window
from osler.rules.code_questions import assigned, constructions, spot

CRITERIA = frozenset((
    "cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss",
    "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "hinge_embedding_loss", "soft_margin_loss",
    "multilabel_soft_margin_loss", "multilabel_margin_loss", "multi_margin_loss", "margin_ranking_loss", "cosine_embedding_loss",
    "triplet_margin_loss", "cross_entropy_loss", "nll_loss_nd"))
PERMUTING = frozenset(("permute", "transpose", "t", "T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims", "rearrange"))
ESCAPES = frozenset(("numpy", "item", "tolist", "__float__", "__int__", "__array__", "__index__", "__bool__", "data", "detach", "detach_"))
INITIALISERS = frozenset(("uniform_", "normal_", "trunc_normal_", "zero_", "fill_", "requires_grad_", "detach_", "set_", "erfinv_"))
CONTAINERS = frozenset(("Sequential", "ModuleList", "ModuleDict"))


def newest(window: Window, kind: str, *keys: str) -> list[Fact]:
    """Of a cumulative fact, the newest of each ``(code line, keys)``."""
    found: dict[Any, Fact] = {}
    for fact in window.facts(kind):
        found[(str(fact.at), tuple(repr(fact.get(k)) for k in keys))] = fact
    return list(found.values())


def criteria(window: Window, validation: bool = False) -> list[Fact]:
    """Criterion calls by line, of training or of validation."""
    return [f for f in newest(window, "criterion", "function", "index") if (f.get("phase", 0) in (1, "validation")) == validation]


LOSS_CLASS = {"cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss", "binary_cross_entropy": "BCELoss", "mse_loss": "MSELoss",
              "binary_cross_entropy_with_logits": "BCEWithLogitsLoss", "l1_loss": "L1Loss", "smooth_l1_loss": "SmoothL1Loss", "huber_loss": "HuberLoss",
              "kl_div": "KLDivLoss", "poisson_nll_loss": "PoissonNLLLoss", "gaussian_nll_loss": "GaussianNLLLoss", "ctc_loss": "CTCLoss"}


def loss_built(window: Window, fact: Fact) -> Location | None:
    """Where the loss of a criterion fact was constructed; its call where there is no loss module."""
    built = spot(fact.get("built_at"))
    if built is not None:
        return built
    function = str(fact.get("function"))
    lines = constructions(window, LOSS_CLASS.get(function, ""))
    return lines[0] if len(lines) == 1 and fact.at is not None and function not in window.line(fact.at.file, fact.at.line) else fact.at


def modules(window: Window) -> dict[int, dict[str, Any]]:
    return {m["id"]: m for fact in window.facts("modules") for m in fact.get("modules") or ()}


def parameters(window: Window) -> dict[int, dict[str, Any]]:
    """The newest record of every parameter, by uid."""
    return {p["uid"]: p for fact in window.facts("params") for p in fact.get("params") or ()}


def numel(shape: Iterable[int]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n


def ancestors(known: dict[int, dict[str, Any]], module: int) -> list[dict[str, Any]]:
    """The module and those that hold it, innermost first."""
    here = known.get(module)
    if here is None:
        return []
    by_name = {m["name"]: m for m in known.values() if m["root"] == here["root"]}
    parts = here["name"].split(".") if here["name"] else []
    names = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
    return [by_name[n] for n in names if n in by_name]


def optimizers(window: Window) -> dict[int, Fact]:
    """The newest fact of every optimizer, by index."""
    return {int(f.get("index", -1)): f for f in window.facts("optimizer")}


def ever_optimized(window: Window) -> set[int]:
    held = {uid for f in window.facts("optimizer") for uid in f.get("uids") or ()}
    return held | {uid for uid, p in parameters(window).items() if p.get("optimizer") is not None or p.get("stepped")}


def reached(window: Window) -> set[int]:
    """Parameters that some backward's autograd graph holds."""
    return {uid for f in window.facts("graph") for uid in f.get("reached") or ()}


def copies(window: Window) -> set[int]:
    """Ids of roots that are copies of a trained root (targets, teachers, averages), or that the script names so."""
    return {int(f["root"]) for f in window.facts("shadow") if f.get("root") is not None} | named_teachers(window)


TEACHER = re.compile(r"(^|_)(teacher\w*|ema|old|ref_(model|policy|net)|reference|frozen|shadow|(target|tgt)_(net|network|q\w*|model|critic|actor|policy|value)|"
                     r"(q\w*|net|model|critic|actor|policy|value)_(target|tgt))(_|$|\d)", re.I)
"""What a network is called whose answers are only compared with."""


def named_teachers(window: Window) -> set[int]:
    """Ids of roots that are assigned to a name like ``teacher`` where they are built."""
    found: set[int] = set()
    for fact in window.facts("modules"):
        for root in fact.get("roots") or ():
            name = assigned(window, spot(root.get("at")))
            if name and TEACHER.search(name.split(".")[-1]):
                found.add(int(root["id"]))
    return found


def shown(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@dataclass(frozen=True)
class Pass:
    """One backward of a trace. ``start`` is the first operation after the backward or step before it; ``needed`` are the
    indices of the operations that the loss depends on in dataflow (through cuts, as far as values travel in tensors)."""

    trace: Trace
    backward: Op
    start: int
    loss: int | None
    needed: frozenset[int]

    @property
    def operations(self) -> Iterator[Op]:
        """The operations of this pass that the loss depends on, in program order."""
        return (op for op in self.trace.ops[self.start: self.backward.index] if op.index in self.needed)

    def uses(self, uids: set[int]) -> list[Op]:
        """Operations of this pass, needed or not, that take one of the parameters."""
        return [op for op in self.trace.ops[self.start: self.backward.index] if any(self.trace.tensors[t].uid in uids for t in op.ins)]


def passes(window: Window) -> list[Pass]:
    """For every trace the first backward of each code line."""
    found = []
    for trace in window.traces:
        seen: set[str] = set()
        start = 0
        for op in trace.ops:
            if op.name == "@backward":
                if str(op.at) not in seen:
                    seen.add(str(op.at))
                    found.append(one_pass(trace, op, start))
                start = op.index + 1
    return found


def one_pass(trace: Trace, backward: Op, start: int) -> Pass:
    if backward.ins:
        return Pass(trace, backward, start, backward.ins[0], frozenset(op.index for op in trace.back(backward)))
    for op in reversed(trace.ops[start: backward.index]):
        if op.outs and not op.name.startswith("@") and trace.tensors[op.outs[0]].requires_grad and numel(trace.tensors[op.outs[0]].shape) == 1:
            return Pass(trace, backward, start, op.outs[0], frozenset((op.index, *(o.index for o in trace.back(op)))))
    return Pass(trace, backward, start, None, frozenset())


def origin(trace: Trace, tid: int, before: int, through: frozenset[str] = VIEWS) -> tuple[Op | None, list[Op]]:
    """The operation that made the values of a tensor, and the views passed on the way back to it."""
    passed: list[Op] = []
    op = trace.producer(tid, before)
    while op is not None and op.name in through and op.ins:
        passed.append(op)
        op = trace.producer(op.ins[0], op.index)
    return op, passed


def criterion_op(window: Window, fact: Fact) -> tuple[Trace, Op] | None:
    """The first traced call that a criterion fact speaks of."""
    for trace in window.traces:
        for op in trace.ops:
            if op.name == fact.get("function") and op.ins and (op.at == fact.at or (op.at is not None and fact.at is not None
                                                                               and (op.at.file, op.at.line) == (fact.at.file, fact.at.line))):
                return trace, op
    return None


def change_line(known: dict[int, dict[str, Any]], op: Op, classes: Iterable[str] = ()) -> Location | None:
    """The line to edit for an operation: where its module was constructed if the operation is a library module of one of
    ``classes`` (or of any class, when the module sits in library containers only), else the line of the operation."""
    here = known.get(op.module)
    if here is not None and here.get("library"):
        built = spot(here.get("at"))
        if built is not None and (here["class"] in set(classes) or all(m.get("library") for m in ancestors(known, op.module))):
            return built
    return op.at


def module_name(known: dict[int, dict[str, Any]], module: int) -> str | None:
    here = known.get(module)
    return (here["name"] or here["class"]) if here is not None else None


def call_line(known: dict[int, dict[str, Any]], op: Op, outer: int) -> Location | None:
    """The line that calls module ``outer``, seen from an operation inside it: each user-written module between the two
    accounts for one ``forward`` frame."""
    inside = 0
    for m in ancestors(known, op.module):
        inside += not m.get("library")
        if m["id"] == outer:
            break
    lines = op.lines
    here = 0
    while inside and here < len(lines) - 1:
        inside -= not lines[here].function or lines[here].function == "forward"
        here += 1
    return lines[here] if lines else None


def cut_in(run: Pass, uids: set[int]) -> Op | None:
    """The operation nearest to the loss that ends the gradient of the parameters although their values flow on."""
    tensors = run.trace.tensors
    users = run.uses(uids)
    flows = {op.index for op in users} & run.needed
    if not flows:
        return None
    tainted = {t for i in flows for t in run.trace.ops[i].outs}
    after = run.trace.forward(tainted) | flows
    cuts = []
    for op in run.operations:
        if op.index not in after or not op.outs or op.name.startswith("@"):
            continue
        carried = [t for t in op.ins if tensors[t].requires_grad and (t in tainted or tensors[t].uid in uids)]
        if carried and (op.name in CUTS or not any(tensors[t].requires_grad for t in op.outs)):
            cuts.append(op)
        elif carried or any(t in tainted for t in op.ins):
            tainted.update(op.outs)
    return cuts[-1] if cuts else None


def escape_in(run: Pass, uids: set[int]) -> Op | None:
    """The last operation before the backward that takes values depending on the parameters out of torch."""
    users = run.uses(uids)
    after = run.trace.forward(t for op in users for t in op.outs)
    loss = run.trace.producer(run.loss, run.backward.index) if run.loss is not None else None
    stop = loss.index if loss is not None else run.backward.index
    found = [op for op in run.trace.ops[run.start: stop] if op.index in after and op.name in ESCAPES]
    return found[-1] if found else None


def hand_written(window: Window) -> set[int]:
    """Parameters that the user's own code writes in place once training runs (hand-made updates, averages, clamps)."""
    found = set()
    for trace in window.traces:
        owner = {t.storage: t.uid for t in trace.tensors if t.uid >= 0 and t.storage >= 0}
        running, stepping = trace.first_step > 0, None
        for op in trace.ops:
            running = running or op.name == "@backward"
            if op.name == "@step":
                stepping = op.at  # the optimizer's own operations carry the line of the call
            if running and (op.at is None or stepping is None or op.at != stepping) and op.in_place and not op.name.startswith("@") and op.name not in INITIALISERS:
                written = trace.tensors[op.outs[0]]
                uid = written.uid if written.uid >= 0 else owner.get(written.storage, -1)
                if uid >= 0:
                    found.add(uid)
    return found


@dataclass(frozen=True)
class Starved:
    """Optimized parameters without any gradient: ``never`` got none, ``zero`` got exact zeros only. ``settled`` says that
    enough was seen to call it so."""

    never: set[int]
    zero: set[int]
    steps: int
    settled: bool


def starved(window: Window, patience: int = 200) -> Starved:
    """Trainable parameters of the optimizers in use that no backward ever served (stale optimizers left out)."""
    known = parameters(window)
    seen = window.last("gradients")
    never: set[int] = set()
    zero: set[int] = set()
    steps = 0
    if seen is not None:
        never, zero, steps = set(seen.get("never") or ()), set(seen.get("always_zero") or ()), int(seen.get("steps_seen") or 0)
    else:
        graphs = window.facts("graph")
        if graphs:
            never = set(graphs[-1].get("unreached_optimized") or ()) - reached(window)
            steps = len(graphs)
    idle = {uid for uids in stale_optimizers(window).values() for uid in uids}
    by_hand = hand_written(window)

    def trainable(uid: int) -> bool:
        return bool(known.get(uid, {}).get("requires_grad", True)) and uid not in idle and uid not in by_hand

    return Starved({u for u in never if trainable(u)}, {u for u in zero if trainable(u)}, steps,
                   steps > 0 and (window.final or window.n_steps >= patience))


def stale_optimizers(window: Window) -> dict[int, set[int]]:
    """Optimizers none of whose parameters any backward reaches, while some backward reaches parameters that none holds."""
    served = reached(window) | {u for f in window.facts("gradients") for key in ("sometimes", "always_zero") for u in f.get(key) or ()}
    if not (reached(window) - ever_optimized(window)) & set(parameters(window)):
        return {}
    held = {index: set(f.get("uids") or ()) for index, f in optimizers(window).items()}
    return {index: uids for index, uids in held.items() if uids and not uids & served}
