from __future__ import annotations

import ast
from collections.abc import Iterator

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import dotted, nodes, quoted
from osler.rules.graph_questions import criteria, criterion_op, loss_built, modules, origin, parameters

DEFAULT = -100


@rule("label-mask", "wiring")
def check(window: Window, *, padded: float = 0.1, everything: float = 0.999) -> Iterator[Finding]:
    """Target positions are counted or ignored by mistake.

    What it is: ignore_index is the number of a real class; padding is counted in the loss; the end token is masked together with the
    padding that shares its number; every position is ignored.
    How it is seen: the values of integer targets against ignore_index and the number of classes, the padding_idx of embeddings (without
    one, a number that stands in runs of different lengths at the ends of sequences and nowhere else), and the share of ignored positions,
    at the criterion calls looked at.
    Why it matters: an ignored class is never learned; counted padding (at least `padded` of the positions) makes the loss look good and
    teaches the model to predict padding; a model that never sees the end token in a target never stops.
    What to do: ignore_index = the padding's own number and no class's; a padding token of its own.
    When this is wrong: skipping a background class on purpose looks like a collision; sequences whose padding number is not a class of its own are
    not reported.
    Source: huggingface/transformers issue 22794 (pad token equal to the end token).
    """
    for fact in criteria(window):
        if fact.get("function") not in ("cross_entropy", "nll_loss") or not (fact.get("target") or {}).get("shape"):
            continue
        found = all_ignored(window, fact, everything) or collision(window, fact) or counted_padding(window, fact, padded) or masked_end(window, fact)
        if found is not None:
            yield found
            return


def said(window: Window, fact: Fact, place: Location | None, severity: str, certainty: str, title: str, fix: str, evidence: Evidence) -> Finding:
    also = (str(fact.at),) if fact.at is not None and fact.at != place else ()
    return Finding("label-mask", certainty, severity, title, fix.format(line=quoted(window, place, str(fact.get("function")))), Where.at(place, also=also), first_step=fact.get("first_step", fact.step),
                   evidence=(evidence,), explains=("loss-plateau", "class-imbalance-metric"))


def all_ignored(window: Window, fact: Fact, everything: float) -> Finding | None:
    share = fact.get("ignored_share")
    if not isinstance(share, int | float) or share < everything:
        return None
    return said(window, fact, loss_built(window, fact), "fatal", "certain", "every target position is ignored", "Check ignore_index and the labels at {line}.",
                Evidence(f"{share:.1%} of the target positions equal ignore_index={fact.get('ignore_index')}", "criterion/target", value=float(share), threshold=everything,
                         samples=int(fact.get("sampled") or 1)))


def tokens(window: Window) -> tuple[bool, set[int]]:
    """Whether the model reads token numbers, and the padding numbers its embeddings declare."""
    embeddings = [m for m in modules(window).values() if m["class"] in ("Embedding", "EmbeddingBag")]
    declared = {int(p) for m in embeddings if isinstance(p := (m.get("attrs") or {}).get("padding_idx"), int)}
    return bool(embeddings), declared


def sequence(window: Window, fact: Fact) -> bool:
    """The targets are positions of sequences: more than one axis, or flattened from more than one."""
    if len(fact["target"]["shape"]) > 1:
        return True
    call = criterion_op(window, fact)
    if call is None or len(call[1].ins) < 2:
        return False
    trace, op = call
    _, views = origin(trace, op.ins[1], op.index)
    return any(len(trace.tensors[t].shape) > 1 for v in views for t in v.ins[:1])


def collision(window: Window, fact: Fact) -> Finding | None:
    ignore, share = fact.get("ignore_index"), fact.get("ignored_share")
    classes = list((fact.get("input") or {}).get("shape") or (0, 0))
    if not isinstance(ignore, int) or not isinstance(share, int | float) or len(classes) < 2 or not 0 <= ignore < classes[1] or share <= 0:
        return None
    _, declared = tokens(window)
    if ignore in declared:
        return None
    positions = sequence(window, fact)
    severity = "note" if positions else "harmful"
    return said(window, fact, loss_built(window, fact), severity, "suspected" if positions else "certain", f"ignore_index={ignore} is the number of a class: its samples do not count",
                "Leave ignore_index at -100 (or give the ignored positions a number of their own) at {line}.",
                Evidence(f"{share:.0%} of the targets are {ignore}, one of {classes[1]} classes, and are ignored", "criterion/target", value=float(share), threshold=0.0,
                         samples=int(fact.get("sampled") or 1)))


def counted_padding(window: Window, fact: Fact, padded: float) -> Finding | None:
    share = fact.get("pad_share")
    if not isinstance(share, int | float) or share < padded or not sequence(window, fact):
        return None
    embedded, declared = tokens(window)
    seen, pad = fact.get("pad_by"), fact.get("pad")
    if seen and embedded and isinstance(pad, int):
        declared = {pad}
    if not seen and not same_words(window, fact):
        return None
    if not declared or fact.get("ignore_index") in declared or fact.get("reduction") == "none" or fact.get("weight"):
        return None
    pad = min(declared)
    how = "a number that stands in runs at the ends of sequences and nowhere else" if seen else "the padding_idx of the model's embedding"
    labels = label_line(window, fact)
    return said(window, fact, labels or loss_built(window, fact), "harmful", "measured", f"padding counts in the loss: {share:.0%} of the target positions are the padding token",
                f"Set the labels of padding to {fact.get('ignore_index')} at {{line}}." if labels is not None else f"Pass ignore_index={pad} at {{line}}.",
                Evidence(f"{share:.0%} of the targets equal {pad}, {how}; ignore_index is {fact.get('ignore_index')}", "criterion/pad_share", value=float(share),
                         threshold=padded, samples=int(fact.get("sampled") or 1)))


def same_words(window: Window, fact: Fact) -> bool:
    """The classes are the words of an embedding that declares its padding: only then has the padding's number the same meaning in the targets."""
    classes = list((fact.get("input") or {}).get("shape") or (0, 0))
    known = modules(window)
    sizes = {int(p["shape"][0]) for p in parameters(window).values() if p.get("shape") and (known.get(p["module"], {}).get("attrs") or {}).get("padding_idx") is not None}
    return not sizes or (len(classes) > 1 and classes[1] in sizes)


def label_line(window: Window, fact: Fact) -> Location | None:
    """Where a library computes the loss: the line of the user's that makes the labels."""
    if fact.at is None or "loss" in window.line(fact.at.file, fact.at.line) or str(fact.get("function")) in window.line(fact.at.file, fact.at.line):
        return None

    def makes(node: ast.AST) -> bool:
        return isinstance(node, ast.Assign) and any(dotted(t).split(".")[-1] == "labels" or (isinstance(t, ast.Subscript) and isinstance(t.slice, ast.Constant) and t.slice.value == "labels")
                                                    for t in node.targets)

    named = nodes(window, makes) or nodes(window, lambda n: isinstance(n, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "labels" for k in n.keys))
    return named[-1][0] if named else None


def masked_end(window: Window, fact: Fact) -> Finding | None:
    """The padding number is set to the end token's, and positions are ignored."""
    if not fact.get("ignored_share"):
        return None

    def shares(node: ast.AST) -> bool:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return False
        left, right = dotted(node.targets[0]).lower().split(".")[-1], dotted(node.value).lower().split(".")[-1]
        return "pad" in left and "eos" in right

    tie = nodes(window, shares)
    if not tie:
        return None
    masks = nodes(window, lambda n: (isinstance(n, ast.Constant) and n.value == 100) or (isinstance(n, ast.keyword) and n.arg == "ignore_index"))
    place = masks[0][0] if masks else loss_built(window, fact)
    return said(window, fact, place, "harmful", "suspected", "the padding token is the end token: masking the padding masks the end too",
                "Give padding a number of its own, or mask by length, at {line}.",
                Evidence(f"{quoted(window, tie[0][0], 'the source')} makes them one number, and {float(fact['ignored_share']):.0%} of the targets are ignored", "criterion/target",
                         value=float(fact["ignored_share"]), threshold=0.0, samples=int(fact.get("sampled") or 1)))
