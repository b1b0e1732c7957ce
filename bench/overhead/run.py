"""What watching costs: per-step ratios, start-up and memory of osler and of others, against the unwatched script.

usage: python bench/overhead/run.py [--quick] [--json OUT] [--only W1,W4] [--rounds N] [--peer-rounds N] [--peers a,b | --no-peers]

The estimator is described in ``analyse.py``. Workloads are the plain scripts in ``workloads/``; osler sees them through
``osler run``, as anybody's script. ``--quick`` ends within five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import harness  # noqa: E402
from analyse import compare, estimate  # noqa: E402

WORKLOADS = {
    "W1": "MLP 784-512-512-10, batch 128, Adam",
    "W2": "small ResNet, 3x32x32, batch 32",
    "W3": "transformer 6x256, sequence 128, batch 8, AdamW, clipping",
    "W4": "two-layer MLP, batch 16",
}
STEPS = {"W1": 800, "W2": 80, "W3": 36, "W4": 20000}
QUICK_STEPS = {"W1": 250, "W2": 24, "W3": 12, "W4": 6000}
PEERS = ("naive", "tensorboard", "anomaly", "torchmortem", "torch-audit", "torch-audit-each")
QUICK_PEERS = {"W4": PEERS, "W1": ("naive", "torchmortem")}
QUICK_SECONDS = 265.0
HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TOP_PAD_": str(2**26)}
"""glibc keeps freed memory. Otherwise a fifth of a W1 step is page faults, how many is decided by chance in the first steps of a
process, and ratios of 0.75 to 1.15 between equal processes come out."""


@dataclass
class Side:
    """One process of a pair and what it left behind."""

    name: str
    process: subprocess.Popen[bytes]
    spawned: float
    out: Path
    ended: float = 0.0
    supervisor_mib: float = 0.0

    def steps(self) -> np.ndarray:
        return np.load(f"{self.out}.npy")

    def notes(self) -> dict[str, Any]:
        return json.loads(Path(f"{self.out}.json").read_text())

    def own_overhead(self) -> float | None:
        """What osler says of itself."""
        try:
            return json.loads(Path(f"{self.out}.findings.json").read_text())["overhead"]["fraction"]
        except (OSError, ValueError, KeyError, TypeError):
            return None


def start(name: str, workload: str, steps: int, core: int | None, folder: Path, osler: list[str]) -> Side:
    """``name`` is plain, null, osler or a peer."""
    out = folder / f"{name}-{time.monotonic_ns()}"
    script = str(HERE / "workloads" / f"{workload.lower()}.py")
    env = {k: v for k, v in os.environ.items() if not k.startswith("OSLER")}
    env |= {"BENCH_OUT": str(out), "BENCH_STEPS": str(steps), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "OSLER_DIR": str(folder / "runs"), **HEAP}
    if core is not None:
        env["BENCH_CORE"] = str(core)
    if name == "osler":
        command = [*osler, "run", "--quiet", "--json", f"{out}.findings.json", script]
    else:
        command = [sys.executable, script, *([] if name in {"plain", "null"} else ["--peer", name])]
    spawned = time.perf_counter()
    with open(f"{out}.stderr", "wb") as stderr:
        process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
    return Side(name, process, spawned, out)


def finish(sides: list[Side], timeout: float) -> None:
    """Waits for both, notes when each ended and how large osler's supervisor became."""
    limit, left = time.perf_counter() + timeout, list(sides)
    while left:
        for side in list(left):
            if side.name == "osler":
                side.supervisor_mib = max(side.supervisor_mib, high_water(side.process.pid))
            if side.process.poll() is not None:
                side.ended = time.perf_counter()
                left.remove(side)
        if time.perf_counter() > limit:
            for side in left:
                side.process.kill()
                side.process.wait()
                side.ended = time.perf_counter()
            return
        time.sleep(0.02)


def high_water(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return 0.0


def pair(workload: str, name: str, steps: int, cores: tuple[int, int] | None, folder: Path, osler: list[str], timeout: float) -> dict[str, Any]:
    """One unwatched process and one of variant ``name``, at the same time."""
    order = [("plain", 0), (name, 1)]
    random.shuffle(order)
    sides = {which: start(which, workload, steps, cores[i] if cores else None, folder, osler) for which, i in order}
    finish(list(sides.values()), timeout)
    plain, other = sides["plain"], sides[name]
    row: dict[str, Any] = {"workload": workload, "variant": name, "cores": cores, "steps": steps}
    for side in (plain, other):
        if side.process.returncode:
            words = Path(f"{side.out}.stderr").read_text(errors="replace").strip().splitlines()
            return {**row, "failed": f"{side.name}: exit {side.process.returncode}: {words[-1][:160] if words else ''}"}
    try:
        a, b, ratios = plain.notes(), other.notes(), compare(plain.steps(), other.steps())
    except (OSError, ValueError) as problem:
        return {**row, "failed": f"{type(problem).__name__}: {problem}"}
    first = [float(side.steps()[:5, 1].sum()) for side in (plain, other)]
    return {**row, "median": float(np.median(ratios.medians)), "cpu_mean": float(np.median(ratios.cpu_means)), **asdict(ratios),
            "plain_ms": 1000 * float(np.median(plain.steps()[:, 1])),
            "startup_s": (b["ready"] - other.spawned) - (a["ready"] - plain.spawned),
            "startup_cpu_s": b["ready_cpu"] - a["ready_cpu"],
            "first_steps_s": first[1] - first[0],
            "after_s": (other.ended - other.steps()[-1, 0]) - (plain.ended - plain.steps()[-1, 0]),
            "memory_mib": b["peak_mib"] - a["peak_mib"], "supervisor_mib": other.supervisor_mib or None,
            "self_reported": other.own_overhead()}


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One entry per workload, peers inside it; start-up and memory over all workloads."""
    good = [r for r in rows if "failed" not in r]
    result: dict[str, Any] = {}
    for workload in WORKLOADS:
        mine = [r for r in good if r["workload"] == workload]
        if not mine:
            continue
        entry: dict[str, Any] = {"what": WORKLOADS[workload], "step_ms": float(np.median([r["plain_ms"] for r in mine]))}
        for name, prefix in (("osler", ""), ("null", "null_")):
            entry |= {prefix + key: value for key, value in figures([r for r in mine if r["variant"] == name]).items()}
        reported = [r["self_reported"] for r in mine if r["variant"] == "osler" and r["self_reported"] is not None]
        entry["self_reported"] = float(np.median(reported)) if reported else None
        entry["peers"] = {name: figures([r for r in mine if r["variant"] == name])
                          for name in sorted({r["variant"] for r in mine} - {"osler", "null"})}
        result[workload] = entry
    watched, null = ([r for r in good if r["variant"] == name] for name in ("osler", "null"))
    for key in ("startup_s", "startup_cpu_s", "first_steps_s", "after_s", "memory_mib", "supervisor_mib"):
        for rows_of, prefix in ((watched, ""), (null, "null_")):
            values = [r[key] for r in rows_of if r.get(key) is not None]
            if values:
                median, low, high = harness.bootstrap_median(values)
                result |= {prefix + key: median, f"{prefix}{key}_low": low, f"{prefix}{key}_high": high}
    failed = sorted({f"{r['workload']} {r['variant']}: {r['failed']}" for r in rows if "failed" in r})
    return {**result, "failed": failed}


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratio with interval from the rounds of one variant."""
    if not rows:
        return {}
    median, low, high = estimate([r["medians"] for r in rows])
    mean, mean_low, mean_high = estimate([r["cpu_means"] for r in rows])
    return {"ratio": median, "ratio_low": low, "ratio_high": high, "low": low, "high": high,
            "cpu_ratio": estimate([r["cpu_medians"] for r in rows], repeats=2)[0],
            "mean_ratio": mean, "mean_low": mean_low, "mean_high": mean_high, "rounds": len(rows)}


def show(result: dict[str, Any]) -> None:
    rows = []
    for workload in WORKLOADS:
        if workload not in result:
            continue
        entry = result[workload]
        for label, f, own in [("null", {k.removeprefix("null_"): v for k, v in entry.items() if k.startswith("null_")}, None),
                              ("osler", entry, entry["self_reported"]),
                              *[(name, f, None) for name, f in entry["peers"].items()]]:
            if "ratio" in f:
                rows.append((workload, f"{entry['step_ms']:.2f}", label, f"{f['ratio']:.3f}", f"{f['low']:.3f}–{f['high']:.3f}",
                             f"{f['cpu_ratio']:.3f}", f"{f['mean_ratio']:.3f}", f"{f['mean_low']:.3f}–{f['mean_high']:.3f}",
                             None if own is None else f"{100 * own:.2f} %", f["rounds"]))
    columns = ["", "step ms", "watched by", "median step", "interval", "its cpu", "mean cpu", "interval ", "says of itself", "rounds"]
    harness.table("Step time over the unwatched step", columns, rows, right=columns[1:2] + columns[3:])
    harness.table("Once per run, osler over unwatched (null beside it)", ["", "median", "interval", "null"],
                  [(key, result[key], f"{result[key + '_low']:.3g} – {result[key + '_high']:.3g}", result.get("null_" + key))
                   for key in ("startup_s", "startup_cpu_s", "first_steps_s", "after_s", "memory_mib", "supervisor_mib") if key in result],
                  right=["median", "interval", "null"])
    for line in result["failed"]:
        print("skipped:", line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds and short runs, within five minutes")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--only", default=",".join(WORKLOADS), metavar="W1,W4")
    parser.add_argument("--rounds", type=int, help="pairs of osler and of null (an even number; default 12, quick 2)")
    parser.add_argument("--peer-rounds", type=int, help="pairs of each peer (default 4, quick 1)")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--osler", default=f"{shlex.quote(sys.executable)} -m osler", metavar="CMD")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 12)
    peer_rounds = options.peer_rounds or (1 if options.quick else 4)
    workloads = [w for w in WORKLOADS if w in options.only.split(",")]
    peers = [] if options.no_peers else [p for p in options.peers.split(",") if p]
    steps = QUICK_STEPS if options.quick else STEPS
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        parser.error("two cores are needed: both processes of a pair run at the same time")

    plan = []
    for number in range(max(rounds, peer_rounds)):
        for workload in workloads:
            variants = ["osler", "null"] if number < rounds else []
            if number < peer_rounds:
                variants += [p for p in peers if not options.quick or p in QUICK_PEERS.get(workload, ())]
            random.shuffle(variants)
            plan += [(number, workload, v) for v in variants]
    if options.quick:
        plan.sort(key=lambda p: p[2] not in {"osler", "null"})

    started, rows, crashed = time.perf_counter(), [], set()
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as name:
        for number, (turn, workload, variant) in enumerate(plan, 1):
            left = QUICK_SECONDS - (time.perf_counter() - started) if options.quick else float("inf")
            if left < 15 or (workload, variant) in crashed:
                continue
            chosen = (cores[turn % 2], cores[1 - turn % 2])
            row = pair(workload, variant, steps[workload], chosen, Path(name), shlex.split(options.osler), min(left, 900.0))
            rows.append({**row, "round": turn})
            text = row.get("failed") or f"median {row['median']:.3f}, mean cpu {row['cpu_mean']:.3f}, start-up {row['startup_s']:+.2f} s"
            print(f"[{number}/{len(plan)}] {workload} {variant}: {text.replace(name, '.')}", file=sys.stderr, flush=True)
            if "failed" in row:
                row["failed"] = rows[-1]["failed"] = row["failed"].replace(name, ".")
                if variant not in {"osler", "null"}:
                    crashed.add((workload, variant))
    result = {**summarise(rows), "pairs": len(rows), "not_run": len(plan) - len(rows), "seconds": round(time.perf_counter() - started, 1)}
    show(result)
    if options.json:
        harness.write(options.json, result, rows, workloads=WORKLOADS, steps={w: steps[w] for w in workloads},
                      estimator="see bench/overhead/analyse.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
