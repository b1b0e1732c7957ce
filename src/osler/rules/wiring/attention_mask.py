from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.trace import Op, Trace
from osler.core.window import Window
from osler.rules.code_questions import quoted
from osler.rules.graph_questions import module_name, modules, origin

MASKED = ("masked_fill", "masked_fill_", "scaled_dot_product_attention", "multi_head_attention_forward")
ATTENTION = ("attention", "softmax", "matmul")


@rule("attention-mask", "wiring")
def check(window: Window, *, effect: float = 1e-3, nearly: float = 0.99) -> Iterator[Finding]:
    """The attention mask is missing, inverted, or masks everything.

    What it is: a language model without a causal mask sees the tokens it shall predict; a mask of the wrong polarity hides the tokens
    and keeps the padding, or hides the past and keeps the future; a row that is masked entirely makes softmax 0/0.
    How it is seen: in a forked copy, later tokens are replaced and outputs at earlier positions change (by more than `effect`), while the
    target is the input moved by one; shares of masked positions at every masking operation recorded, and the end of the rows at which token ids are filled up and that the mask hides; the softmax that made a NaN.
    Why it matters: with the answer in view, the loss falls far below what can be predicted and generation fails; an inverted mask leaves
    only padding to look at.
    What to do: is_causal=True or an upper-triangular mask; True means "hide" in masked_fill and key_padding_mask, "keep" in
    scaled_dot_product_attention; a finite fill value, or no empty rows.
    When this is wrong: encoders and masked language models see both sides by design: their target is not the input moved by one.
    Source: torch issues 40932 and 41508; minGPT issue 75.
    """
    fatal = next(empty_rows(window), None)
    if fatal is not None:
        yield fatal
        return
    inverted = next(polarity(window, nearly), None)
    if inverted is not None:
        yield inverted
        return
    yield from sees_future(window, effect)


def masks(window: Window) -> Iterator[tuple[Trace, Op, str, dict[str, Any]]]:
    """Every recorded mask: ``hidden_share``, ``full_rows``, ``hides_future``, ``hides_past``."""
    for trace in window.traces:
        for op in trace.named(*MASKED):
            parts = {"attn_mask": op.values} if "hidden_share" in op.values else op.values
            for name, figures in parts.items():
                if isinstance(figures, dict) and "hidden_share" in figures:
                    yield trace, op, name, figures


def empty_rows(window: Window) -> Iterator[Finding]:
    born = [f for f in window.facts("nonfinite") if f.get("op_kind") == "softmax-of-masked-row"]
    if not born:
        return
    fact = born[0]
    located = next((f.at for f in born if f.get("line_by")), None)
    rows = [(op, figures) for _, op, _, figures in masks(window) if figures.get("full_rows")]
    op = rows[0][0] if rows else next((o for t in window.traces for o in t.named("masked_fill", "masked_fill_")), None)
    place: Location | None = (op.at if op is not None else None) or located or fact.at
    operand = fact.get("operand") or {}
    yield Finding(
        "attention-mask", "certain", "fatal", "a row of attention scores is masked entirely: softmax gives NaN",
        f"Fill with a finite value such as -1e4 at {quoted(window, place, 'the mask')}, or leave out sequences without any real token.",
        Where.at(place, module=module_name(modules(window), op.module) if op is not None else None, also=(str(located),) if located and located != place else ()), first_step=fact.get("first_step", fact.step),
        evidence=(Evidence(f"softmax made {operand.get('nan') or operand.get('nonfinite') or 'some'} NaN of {operand.get('numel') or 'its'} values"
                           + (f"; {rows[0][1]['full_rows']} rows of the mask hide every position" if rows else ""), "nonfinite",
                           value=float(operand.get("nan") or operand.get("nonfinite") or 0), threshold=0.0, samples=int(operand.get("numel") or 0)),),
        explains=("loss-nan", "nonfinite-gradient", "division-by-zero", "log-of-zero"))


def polarity(window: Window, nearly: float) -> Iterator[Finding]:
    known = modules(window)
    for trace, op, name, figures in masks(window):
        hidden = float(figures["hidden_share"])
        future, past = figures.get("hides_future"), figures.get("hides_past")
        title = ""
        if past is not None and future is not None and past > nearly and future < 1 - nearly:
            title = "the causal mask is inverted: it hides the past and shows the future"
        elif hidden >= 1.0 and op.grad:
            title = "the mask hides every position"
        elif name != "attn_mask" or op.name.startswith("masked_fill"):
            title = from_padding(trace, op, name) or wrong_end(trace, figures)
        if title:
            evidence = f"{op.name}: {hidden:.0%} of the positions are hidden" + (f", {past:.0%} of the past and {future:.0%} of the future" if past is not None and future is not None else "")
            yield Finding(
                "attention-mask", "certain", "harmful", title, f"Invert the mask at {quoted(window, op.at, op.name)}.", Where.at(op.at, module=module_name(known, op.module)), first_step=op.step,
                evidence=(Evidence(evidence, "trace/mask", value=hidden, threshold=1.0),), explains=("loss-plateau", "log-of-zero"))


def from_padding(trace: Trace, op: Op, name: str) -> str:
    """Padding masks say "hide where the token is padding": one that is made by `token != padding` hides the tokens."""
    wanted = "bool"
    tids = [t for t in op.ins[1:] if trace.tensors[t].dtype == wanted]
    for tid in tids:
        if name == "key_padding_mask" and len(trace.tensors[tid].shape) != 2:
            continue
        flips = 0
        made, _ = origin(trace, tid, op.index)
        while made is not None and made.name in ("logical_not", "bitwise_not", "invert") and made.ins:
            flips += 1
            made, _ = origin(trace, made.ins[0], made.index)
        if made is None or len(made.ins) != 1 or "int" not in trace.tensors[made.ins[0]].dtype:
            continue
        if (made.name in ("ne", "gt") and flips % 2 == 0) or (made.name == "eq" and flips % 2 == 1):
            return "the padding mask is inverted: it hides the tokens and keeps the padding"
    return ""


def wrong_end(trace: Trace, figures: dict[str, Any], filled: float = 0.3, few: float = 0.05) -> str:
    """Token ids are filled up at one end of every row, and the mask hides the other end."""
    ends = next(({end: float(op.values[f"padded_{end}"]) for end in ("head", "tail")} for op in trace.named("embedding") if "padded_head" in op.values), None)
    hides = {end: float(figures.get(f"hides_{end}") or 0.0) for end in ("head", "tail")}
    for end, other in (("head", "tail"), ("tail", "head")):
        if ends is not None and ends[end] > filled and ends[other] < few and hides[other] > filled and hides[end] < few:
            return f"the padding mask is inverted: rows are filled up at the {'end' if end == 'tail' else 'start'}, and it hides the other side"
    return ""


def sees_future(window: Window, effect: float) -> Iterator[Finding]:
    for fact in window.facts("experiment"):
        if fact.get("name") != "causality" or not fact.get("leak") or not fact.get("target_is_shifted_input") or float(fact.get("effect") or 0.0) <= effect:
            continue
        attention = fact.get("kind") in ATTENTION or "ttention" in str(fact.get("first_class"))
        title = "outputs depend on later tokens although the target is the next token" + (": the causal mask is missing" if attention else f", through {fact.get('first_op')}")
        cure = "Pass is_causal=True" if fact.get("first_op") == "scaled_dot_product_attention" else "Mask the upper triangle of the scores before the softmax" if attention else "Let it see earlier positions only"
        yield Finding(
            "attention-mask", "certain", "harmful", title, f"{cure} at {quoted(window, fact.at, str(fact.get('first_op')))}.", Where.at(fact.at, module=fact.get("first_module")), first_step=0,
            evidence=(Evidence(f"replacing all tokens after position {fact.get('changed_after')} changed the output at position {fact.get('position')} by {float(fact['effect']):.2g} (relative); "
                               f"the target is the input moved by one in {float(fact.get('agreement') or 1.0):.0%} of places", "experiment/causality", value=float(fact["effect"]), threshold=effect,
                               samples=int(fact.get("steps") or 0)),), explains=("overfit", "target-leak-feature"))
        return
