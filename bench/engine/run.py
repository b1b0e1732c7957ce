"""Does the engine keep up with a training of 1000 steps a second, on one core beside it?

    python bench/engine/run.py [--quick] --json bench/results/engine.json

A real script is recorded first (``examples/broken/layers_in_list``): its facts, trace and sources. Then a process writes steps at 1000 a second on top of them, with
losses, layer samples, criterion calls and batches, while this one follows the folder as the supervisor does, all rules on. Reported are the share of a core that
following takes, the time of one diagnosis, and by how much the newest verdict lags behind what was written.
Last, a loss that becomes NaN in the middle: how long until it is said.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]
import harness  # noqa: E402

from osler.cli.follow import Follower  # noqa: E402
from osler.core.facts import Fact, Location  # noqa: E402
from osler.core.signals import STREAMS  # noqa: E402
from osler.diagnose import catalogue  # noqa: E402
from osler.store.reader import RunReader  # noqa: E402
from osler.store.writer import Writer  # noqa: E402

RATE = 1000
PARAMETERS = 20


def recorded(folder: Path) -> Path:
    """A run of the example script."""
    shutil.copy(ROOT / "examples" / "broken" / "layers_in_list" / "train.py", folder)
    subprocess.run([sys.executable, "-m", "osler", "run", "--quiet", "--dir", "runs", "train.py"], cwd=folder, check=True, capture_output=True,
                   env={**__import__("os").environ, "PYTHONPATH": str(ROOT / "src")})
    return next(path for path in sorted((folder / "runs").iterdir()) if (path / "run.json").exists())


def write(source: Path, folder: Path, seconds: float, nan_at: float, stamp: Any) -> None:
    """The training: what it records, at its pace."""
    reader = RunReader(source)
    reader.refresh()
    window = reader.window(0)
    writer = Writer(folder)
    writer.open()
    for file, text in window.sources.items():
        writer.source(file, text)
    for fact in window.all_facts:
        if fact.kind != "exit":
            writer.fact(fact)
    for trace in window.traces:
        writer.trace(trace)
    rng, began, step = np.random.default_rng(0), time.monotonic(), 0
    uids = [p["uid"] for f in window.facts("params")[:1] for p in f.get("params")][:PARAMETERS] or list(range(PARAMETERS))
    while (now := time.monotonic() - began) < seconds:
        due = int(now * RATE)
        n = due - step
        if n > 0:
            rows = np.zeros(n, STREAMS["steps"].dtype)
            rows["step"], rows["t"] = np.arange(step + 1, due + 1), now
            rows["loss"] = 2.3 * np.exp(-rows["step"] / 40000) + rng.normal(0, 0.05, n)
            rows["backwards"], rows["lr"], rows["grad_norm"], rows["step_time"] = 1, 0.01, rng.lognormal(0, 0.2, n), 1 / RATE
            writer.rows("steps", rows)
            writer.row("calls", (due, now, 0, 0, 64, float(rows["loss"][-1]), 0.5))
            writer.row("batches", (due, now, 0, 0, 0, 64, 1e-4, 0.0, 1.0, 2.2, 10))
            if due // 100 > step // 100:
                for uid in uids:
                    writer.row("layers", (due, uid, 0.1, 3.0, 0.003, 1e-4, 0.0))
            step = due
            if now > nan_at and not stamp[0]:
                stamp[0] = time.monotonic()
                writer.fact(Fact("nonfinite", step, now, Location("train.py", 20, "main"), {
                    "what": "loss", "value": "nan", "before_step": True, "op": "LogBackward0", "op_kind": "log-of-zero", "operand": {"min": 0.0, "max": 1.0, "zeros": 3},
                    "line_by": "graph position", "parameters": [], "recent_losses": [1.0, 1.0]}))
        stamp[1] = step
        time.sleep(0.02)
    writer.close()


def follow(folder: Path, process: Any, stamp: Any) -> dict[str, Any]:
    follower = Follower(folder, {}, folder, lambda _: None)
    began, cpu, looks, lags, said = time.monotonic(), time.process_time(), [], [], None
    while process.is_alive():
        before, at = time.process_time(), stamp[1]
        news = follower.tick()
        used = time.process_time() - before
        if used > 1e-3 and follower.primary is not None:
            looks.append(used)
            lags.append((stamp[1] - (follower.primary.n_steps or at)) / RATE)
        if said is None and any(f.cause in ("log-of-zero", "loss-nan") for f in news):
            said = time.monotonic() - stamp[0]
        time.sleep(0.05)
    wall = time.monotonic() - began
    window = follower.primary
    return {"seconds": round(wall, 1), "steps": int(stamp[1]), "core_share": round((time.process_time() - cpu) / wall, 4), "looks": len(looks),
            "look_ms_median": round(1e3 * float(np.median(looks)), 1), "look_ms_max": round(1e3 * max(looks), 1), "lag_seconds_median": round(float(np.median(lags)), 2),
            "lag_seconds_max": round(max(lags), 2), "said_after_seconds": None if said is None else round(said, 2),
            "steps_seen": window.n_steps if window is not None else 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="15 seconds of training instead of 120")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    seconds = 15.0 if options.quick else 120.0
    with tempfile.TemporaryDirectory(prefix="engine-") as name:
        source = recorded(Path(name))
        folder = Path(name) / "live"
        folder.mkdir()
        shutil.copy(source / "run.json", folder)
        context = multiprocessing.get_context("spawn")
        stamp = context.Array("d", [0.0, 0.0])
        process = context.Process(target=write, args=(source, folder, seconds, 0.7 * seconds, stamp))
        process.start()
        result = follow(folder, process, stamp)
        process.join()
    result = {"rules": len(catalogue.RULES), **result, "keeps_up": result["core_share"] < 1 and result["lag_seconds_max"] < 10 and result["steps_seen"] >= 0.99 * result["steps"]}
    harness.table(f"Following {RATE} steps a second", ["figure", "value"], [(k.replace("_", " "), v) for k, v in result.items()], right=["value"])
    if options.json:
        harness.write(options.json, result, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
