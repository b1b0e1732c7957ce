from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.loaders import VALIDATION, dataset_line, loaders, roles
from osler.rules.script import (
    around,
    call_name,
    calls,
    evaluation_block,
    function_named,
    repeats_same_input,
    training_functions,
    tree,
    words,
)

AUGMENTS = re.compile(r"augment|jitter|flip|crop|mixup|cutmix|cutout|distort|perturb|rotate|random_?(erase|affine|shift)|transform", re.I)
DRAWS = re.compile(r"^(rand|randn|randint|rand_like|randn_like|random|normal|uniform|bernoulli|randrange|choice|shuffle|beta|permutation|randperm)$")


@rule("val-augmented", "evaluation")
def check(window: Window, *, min_rows: int = 16) -> Iterator[Finding]:
    """Random augmentation also acts on validation.

    **What it is.** Validation rows pass through the random transforms that are meant for training: two validations of one
    model give different figures, and both are too low.

    **How it is seen.** Two passes over a validation loader served the same labels at the same positions but other input values
    (fingerprints of `min_rows` rows or more), and the script speaks of augmentation. Without loaders: the evaluating code calls a
    function that draws random numbers and is named after an augmentation, and training calls it too.

    **Why it matters.** The figure is noisy and pessimistic; early stopping and model choice follow the noise.

    **What to do.** Build the validation set with deterministic transforms only. After `random_split` both parts share one
    data set and one transform: split indices first, then make two data sets.

    **When this is wrong.** Tasks whose input is random by definition (denoising) and test-time augmentation, which is
    recognised by several passes or calls within one evaluation.

    **Source.** pytorch/vision discussions on `random_split` with transforms.
    """
    known, role, rows = loaders(window), roles(window), window.stream("rows")
    for index, loader in known.items():
        passes = [rows[(rows["loader"] == index) & (rows["pass_"] == n)] for n in np.unique(rows[rows["loader"] == index]["pass_"])]
        began = [f.get("began_at_step", f.step) for f in window.facts("loader-pass") if f.get("loader") == index]
        if role.get(index) != VALIDATION or len(passes) < 2 or len(set(began)) < len(began):
            continue
        same, changed, n = compare(passes[0], passes[1])
        if n < min_rows or changed < 0.5 or same < 0.99:
            continue
        shared = shared_collate(window, loader)
        at, says = shared or dataset_line(window, loader), augments(window, loader) or shared is not None
        yield Finding(
            "val-augmented", "measured", "harmful" if says else "note",
            f"The validation inputs change from pass to pass: {changed:.0%} of the rows, with equal labels",
            "Build the validation data set without random transforms (its own data set object, not a part of the augmented one).",
            Where.at(at, also=(str(loader.at),) if loader.at and str(loader.at) != str(at) else ()),
            evidence=(Evidence(f"two passes over the same {n} rows: labels equal in {same:.0%}, inputs different in {changed:.0%}", "rows/hash", changed,
                               0.5, n),))
        return
    yield from by_text(window)


def compare(a: np.ndarray, b: np.ndarray) -> tuple[float, float, int]:
    """(share of equal labels, share of other inputs, positions) over the positions that two passes have in common; labels of one
    value only, or none, prove nothing and give 0."""
    _, i, j = np.intersect1d(a["position"], b["position"], return_indices=True)
    a, b = a[i], b[j]
    if not len(a) or (a["label"] < 0).any() or len(np.unique(a["label"])) < 2:
        return 0.0, 0.0, len(a)
    return float((a["label"] == b["label"]).mean()), float((a["hash"] != b["hash"]).mean()), len(a)


def augments(window: Window, loader: Fact) -> bool:
    """Whether the text of the data set's file speaks of augmentation or its ``__getitem__`` draws random numbers."""
    text = window.sources.get(loader.at.file, "") if loader.at is not None else ""
    return bool(AUGMENTS.search(text))


def shared_collate(window: Window, loader: Fact) -> Location | None:
    """The construction of a loader whose ``collate_fn`` draws random numbers and also serves another loader."""
    if loader.at is None:
        return None
    given = [k.value for s in around(window, loader.at)[-1:] for c in calls(s) if c.lineno == loader.at.line or len(list(calls(s, "DataLoader"))) == 1
             for k in c.keywords if k.arg == "collate_fn"]
    name = given[0].id if given and isinstance(given[0], ast.Name) else None
    function = function_named(window, loader.at.file, name) if name else None
    uses = [k for c in calls(tree(window, loader.at.file)) for k in c.keywords if k.arg == "collate_fn" and isinstance(k.value, ast.Name) and k.value.id == name]
    return loader.at if function is not None and draws(function) and len(uses) > 1 else None


def draws(node: ast.AST) -> bool:
    return any(DRAWS.match(call_name(c)) for c in calls(node))


def by_text(window: Window) -> Iterator[Finding]:
    seen: set[int] = set()
    for phase in window.facts("phase"):
        at = phase.at
        if phase.get("kind") != "validation" or at is None or at.line in seen:
            continue
        seen.add(at.line)
        block, module = evaluation_block(window, at), tree(window, at.file)
        if block is None or module is None or repeats_same_input(window, at):
            continue
        training = training_functions(window, at.file)
        inside = {id(c) for c in calls(block)}
        for call in calls(block):
            name = call_name(call)
            function = function_named(window, at.file, name) if AUGMENTS.search(name) else None
            elsewhere = any(id(c) not in inside for c in calls(module, name))
            flagged = any(k.arg in ("train", "training", "augment") for k in call.keywords) or "training" in words(function or call)
            if function is None or not draws(function) or not elsewhere or flagged or function.name in training:
                continue
            yield Finding(
                "val-augmented", "suspected", "harmful", f"The evaluating code passes its inputs through {name}(), which draws random numbers",
                f"Leave {name}() out of the evaluation.", Where.at(Location(at.file, call.lineno), also=(f"{at.file}:{function.lineno}",)),
                first_step=phase.get("first_step"),
                evidence=(Evidence(f"{name}() (line {function.lineno}) is called on the way to the model in training and in validation",
                                   "phase", None, None, 1),))
            return
