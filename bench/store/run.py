"""What recording costs the training process, and how many bytes a run takes.

    python bench/store/run.py [--quick] --json bench/results/store.json

Three costs: of the call on the training thread; of the writer thread beside it (as processor time, which a pure Python loop
feels through the interpreter lock); and of the reader that follows a live run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]
import harness  # noqa: E402

from osler.core.facts import Fact, Location  # noqa: E402
from osler.core.signals import LAYERS  # noqa: E402
from osler.store.reader import RunReader  # noqa: E402
from osler.store.writer import Writer  # noqa: E402

STEP = (12345, 1.5, 0, 1, 2.5, 1e-3, 0.7, 0.01, 0.001, 0.0001)
CALL = (12345, 1.5, 0, 0, 32, 2.5, 0.5)
LAYER = (12345, 7, 0.1, 2.0, 0.001, 1e-5, 0.0)
PARAMETERS = 100


def microseconds(call: Callable[[], object], n: int, repeats: int) -> float:
    """Median over the repeats of the mean time of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(n):
            call()
        times.append((time.perf_counter() - started) / n * 1e6)
        time.sleep(0.3)  # lets the thread write, as a training step would
    return statistics.median(times)


def calls(folder: Path, n: int, repeats: int) -> list[dict[str, object]]:
    writer = Writer(folder)
    writer.open()
    layers = np.zeros(PARAMETERS, LAYERS.dtype)
    fact = Fact("mark", 3, 1.5, Location("train.py", 3, "main"), {"a": 1, "b": [1.0, 2.0], "c": "text"})

    def nothing() -> None:
        (lambda *_: None)("steps", STEP)

    cases: list[tuple[str, Callable[[], object], int]] = [
        ("an empty call, for comparison", nothing, 1),
        ("row('steps', ...)", lambda: writer.row("steps", STEP), 1),
        ("row('calls', ...)", lambda: writer.row("calls", CALL), 1),
        ("row('layers', ...)", lambda: writer.row("layers", LAYER), 1),
        (f"rows('layers', {PARAMETERS} rows)", lambda: writer.rows("layers", layers), PARAMETERS),
        ("row() refused by struct, coerced", lambda: writer.row("steps", (None, *STEP[1:])), 1),
        ("fact(...)", lambda: writer.fact(fact), 1),
    ]
    found = []
    for name, call, rows in cases:
        us = microseconds(call, max(100, n // (10 if rows > 1 or "coerced" in name or "fact" in name else 1)), repeats)
        found.append({"case": name, "us_per_call": us, "us_per_row": us / rows})
    writer.close()
    if writer.error or writer.lost:
        raise SystemExit(f"the measurement itself failed: {writer.error}, {writer.lost} lost")
    return found


def paced(folder: Path, steps: int, per_second: int) -> dict[str, object]:
    """A run at a given pace, with PARAMETERS rows of layers every tenth step: cost of the thread, bytes, reading."""
    (folder / "run.json").write_text('{"schema": 1}')
    writer = Writer(folder)
    writer.open()
    layers = np.zeros(PARAMETERS, LAYERS.dtype)
    reader, reading, busy = RunReader(folder), [], 0.0
    writer.flush()
    cpu, mine, started = time.process_time(), time.thread_time(), time.perf_counter()
    for step in range(1, steps + 1):
        t = time.perf_counter()
        writer.row("steps", (step, *STEP[1:]))
        writer.row("calls", (step, *CALL[1:]))
        if step % 10 == 0:
            layers["step"] = step
            writer.rows("layers", layers)
        busy += time.perf_counter() - t
        if step % per_second == 0:
            before = time.thread_time()
            reader.refresh()
            reader.window()
            reading.append(time.thread_time() - before)
        time.sleep(max(0.0, started + step / per_second - time.perf_counter()))
    writer.flush()
    wall = time.perf_counter() - started
    # Processor time of the whole process less that of this thread: the writer's own.
    thread = time.process_time() - cpu - (time.thread_time() - mine)
    writer.close()
    sizes = {kind: sum(p.stat().st_size for p in folder.glob(pattern)) / steps * 1000
             for kind, pattern in (("steps", "*/steps-*"), ("calls", "*/calls-*"), ("layers", "*/layers-*"), ("pyramids", "*/*pyramid*"))}
    return {"steps_per_second": per_second, "on_thread_us_per_step": busy / steps * 1e6,
            "thread_cpu_percent": 100 * thread / wall, "refresh_ms": 1e3 * statistics.median(reading),
            **{f"bytes_per_1000_steps_{k}": v for k, v in sizes.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    n, repeats = (10_000, 3) if options.quick else (50_000, 9)
    with tempfile.TemporaryDirectory() as folder:
        costs = calls(Path(folder), n, repeats)
    harness.table("Cost on the training thread", ("call", "us a call", "us a row"),
                  [(c["case"], c["us_per_call"], c["us_per_row"]) for c in costs], ("us a call", "us a row"))
    runs = []
    for per_second in (20, 1000):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(paced(Path(folder), per_second * (2 if options.quick else 10), per_second))
    paces = [f"{r['steps_per_second']} steps/s" for r in runs]
    harness.table(f"A paced run: a row of steps and of calls each step, {PARAMETERS} of layers each tenth", ("measured", *paces),
                  [(name, *(r[name] for r in runs)) for name in runs[0]], paces)
    if options.json:
        by_case = {str(c["case"]): c["us_per_row"] for c in costs}
        harness.write(options.json, {
            "us_per_row": by_case["row('steps', ...)"], "us_per_layers_row": by_case["row('layers', ...)"],
            "us_per_layers_row_in_bulk": by_case[f"rows('layers', {PARAMETERS} rows)"], "us_per_fact": by_case["fact(...)"],
            "thread_cpu_percent_at_1000_steps_per_second": runs[1]["thread_cpu_percent"],
            "bytes_per_1000_steps": sum(v for k, v in runs[1].items() if k.startswith("bytes") and isinstance(v, float))},
            [*costs, *runs])


if __name__ == "__main__":
    main()
