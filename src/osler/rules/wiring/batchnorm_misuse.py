from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from osler.core.facts import Location
from osler.core.finding import Evidence, Finding, Where
from osler.core.rule import rule
from osler.core.window import Window
from osler.rules.code_questions import quoted, spot
from osler.rules.graph_questions import modules, parameters, shown

CLASSES = frozenset(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d", "LazyBatchNorm2d"))


@rule("batchnorm-misuse", "wiring")
def check(window: Window, *, high: float = 0.9, unsettled: float = 0.5, tiny: int = 2) -> Iterator[Finding]:
    """Momentum or batch size makes the statistics of batch norm useless.

    What it is: momentum of the wrong convention (torch's is the weight of the new batch: 0.99 keeps only the last one), momentum so small
    that the running statistics stay at their start, or batches of one or two samples.
    How it is seen: momentum of each layer (at least `high`, or so small that more than `unsettled` of the start is left after the run's
    steps), the loader's batch size (at most `tiny`), and the exception for a batch of one.
    Why it matters: evaluation uses the running statistics; if they are those of one batch, or of none, it has little to do with training.
    What to do: momentum 0.1 (torch's default), larger batches, drop_last for a last batch of one, or GroupNorm.
    When this is wrong: momentum 0 on loaded layers freezes their statistics on purpose and is not reported; with images, small batches still
    give many values for each channel and are a note.
    Source: torch.nn.BatchNorm1d documentation; handbook A24.
    """
    known = modules(window)
    layers = [m for m in known.values() if m["class"] in CLASSES]
    loaded = {p["module"] for p in parameters(window).values() if p.get("loaded")}
    for fact in window.facts("exception"):
        if "Expected more than 1 value per channel" in str(fact.get("message")):
            yield one_sample(window, str(fact.get("message")), fact.at, fact.step)
            return
    found = [m for m in layers if m["id"] not in loaded and wrong_momentum(window, m, high, unsettled)]
    if found:
        yield momentum(window, found, high)
        return
    if layers:
        yield from small(window, layers, tiny)


def rate(m: dict[str, Any]) -> float | None:
    value = (m.get("attrs") or {}).get("momentum")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def wrong_momentum(window: Window, m: dict[str, Any], high: float, unsettled: float) -> bool:
    value = rate(m)
    if value is None or (m.get("attrs") or {}).get("track_running_stats") is False:
        return False
    return value >= high or (value < 0.01 and window.final and window.n_steps >= 20 and (1 - value) ** window.n_steps > unsettled)


def momentum(window: Window, found: list[dict[str, Any]], high: float) -> Finding:
    value = rate(found[0]) or 0.0
    left = (1 - value) ** window.n_steps
    place = spot(found[0].get("at"))
    what = ("the running statistics are those of the last batch" if value >= high else f"after {window.n_steps} steps the running statistics are still {left:.0%} their start values")
    validated = any(f.get("kind") == "validation" for f in window.facts("phase"))
    return Finding(
        "batchnorm-misuse", "certain", "harmful" if validated or value >= high else "note", f"batch norm with momentum={value:g}: {what}",
        f"Use momentum=0.1 at {quoted(window, place, 'the layer')} (torch's momentum is the weight of the new batch).",
        Where.at(place, module=found[0]["name"], also=tuple(str(a) for m in found[1:4] if (a := spot(m.get("at"))) is not None and a != place)), first_step=0,
        evidence=(Evidence(f"momentum is {value:g} in {shown(m['name'] for m in found)}", "modules/momentum", value=value, threshold=high if value >= high else 0.01, samples=window.n_steps),),
        treatment="bn-momentum-default", explains=("overfit", "val-preprocessing-mismatch"))


def small(window: Window, layers: list[dict[str, Any]], tiny: int) -> Iterator[Finding]:
    inputs = [f for f in window.facts("input") if f.get("phase") == "train" and f.get("shape")]
    sizes = {int(f["shape"][0]) for f in inputs}
    if not sizes or max(sizes) > tiny or window.n_steps < 10:
        return
    flat = any(m["class"].endswith("1d") for m in layers) and all(len(f["shape"]) <= 2 for f in inputs)
    loader = next((f for f in window.facts("loader") if f.get("batch_size") in sizes), None)
    place: Location | None = loader.at if loader is not None else spot(layers[0].get("at"))
    yield Finding(
        "batchnorm-misuse", "measured", "harmful" if flat or max(sizes) == 1 else "note", f"batch norm over batches of {max(sizes)}",
        f"Use larger batches at {quoted(window, place, 'the loader')}, or GroupNorm/LayerNorm in place of batch norm.",
        Where.at(place, module=layers[0]["name"], also=tuple(str(a) for m in layers[:2] if (a := spot(m.get("at"))) is not None and a != place)), first_step=0,
        evidence=(Evidence(f"{len(layers)} batch norm layers get {max(sizes)} samples at a time", "input/shape", value=float(max(sizes)), threshold=float(tiny), samples=len(inputs)),),
        explains=("overfit", "loss-spikes"))


def one_sample(window: Window, message: str, at: Location | None, step: int) -> Finding:
    loader = next((f for f in window.facts("loader") if f.get("rows") and f.get("batch_size") and f["rows"] % f["batch_size"] == 1 and not f.get("drop_last")), None)
    place = loader.at if loader is not None else at
    return Finding(
        "batchnorm-misuse", "certain", "fatal", "batch norm got a batch of one sample",
        f"Pass drop_last=True at {quoted(window, place, 'the loader')}, or choose a batch size that leaves no single row." if loader is not None else "Give batch norm more than one sample, or use LayerNorm.",
        Where.at(place, also=(str(at),) if at is not None and at != place else ()), first_step=step,
        evidence=(Evidence(message[:160] + (f"; {loader['rows']} rows in batches of {loader['batch_size']} leave one" if loader is not None else ""), "exception"),), explains=("script-failed",))
