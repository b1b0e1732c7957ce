"""Faults of the data."""

from __future__ import annotations

import re

from script import Script, keyword, operator


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
