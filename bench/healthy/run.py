"""Healthy trainings of many kinds under osler: whatever it calls fatal or harmful in one of them is a false alarm.

usage: python bench/healthy/run.py [--quick] [--jobs 2] [--only SUBSTR] [--keep DIR] [--json OUT] [--osler CMD]

Every file of ``cases/`` is a complete program of a few seconds, written independently of the others, and none of them is changed to
suit a rule. An **alarm** is a finding of severity fatal or harmful that no other finding explains. A run whose script fails, or that writes no
findings, is broken and counts neither way.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
import harness  # noqa: E402

LOUD = frozenset({"fatal", "harmful"})
QUICK = frozenset({
    "tabular_mlp", "digits_cnn", "char_lstm", "packed_gru", "gan_ring", "vae_digits", "simclr_digits", "reinforce_corridor", "dqn_chain", "finetune_frozen",
    "distillation", "warm_restarts", "noisy_labels", "sparse_autoencoder", "fp16_scaler", "accumulation", "ema_weights", "lbfgs_fit", "kfold", "early_stopping",
    "iterable_stream", "gnn_adjacency", "ctc_sequences", "maml_sines", "diffusion_2d", "physics_informed", "causal_transformer", "resume_checkpoint",
})
QUICK_SECONDS = 270.0
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "lightning_module": ("lightning",)}


@dataclass(frozen=True)
class Run:
    """What came of one case. ``alarms`` and ``notes`` are causes; ``titles`` says the alarms in words."""

    case: str
    alarms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    steps: int | None = None
    broken: str | None = None
    exit: int | str | None = None
    seconds: float = 0.0
    overhead: float | None = None
    stderr: str = field(default="", repr=False)

    @property
    def mark(self) -> str:
        return "BROKEN" if self.broken else "ALARM" if self.alarms else "silent"


def missing(case: str) -> str | None:
    """The package that a case needs and that is not installed."""
    import importlib.util

    return next((name for name in NEEDS.get(case, ()) if importlib.util.find_spec(name) is None), None)


def run(case: Path, osler: list[str], timeout: float, keep: Path | None) -> Run:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="healthy-", ignore_cleanup_errors=True) as name:
        work, out = Path(name), Path(name) / "findings.json"
        shutil.copy(case, work / "train.py")
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        code, stderr = finish([*osler, "run", "--dir", "runs", "--json", str(out), "train.py"], work, env, timeout)
        seconds = round(time.perf_counter() - started, 1)
        if keep is not None and (work / "runs").is_dir():
            shutil.copytree(work / "runs", keep / case.stem / "runs", dirs_exist_ok=True)
        try:
            document = json.loads(out.read_text())
            own = [f for f in document["findings"] if not f.get("explained_by")]
        except (OSError, ValueError, KeyError, TypeError) as e:
            return Run(case.stem, broken=f"no findings: {type(e).__name__}", exit=code, seconds=seconds, stderr=stderr[-1500:])
        loud = [f for f in own if f.get("severity") in LOUD]
        overhead = document.get("overhead") or {}
        return Run(case.stem, tuple(f["cause"] for f in loud), tuple(f["cause"] for f in own if f.get("severity") not in LOUD),
                   tuple(f"{f.get('title')} ({(f.get('where') or {}).get('file')}:{(f.get('where') or {}).get('line')})" for f in loud),
                   overhead.get("steps"), None if code == 0 else f"the script ended with {code}", code, seconds, overhead.get("fraction"),
                   stderr[-1500:] if code else "")


def finish(command: list[str], work: Path, env: dict[str, str], timeout: float) -> tuple[int | str, str]:
    """Exit code (or "timeout") and stderr; a run over time is ended with all of its children."""
    process = subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    try:
        _, stderr = process.communicate(timeout=timeout)
        return process.returncode, stderr
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
        return "timeout", stderr


def summary(runs: list[Run]) -> dict[str, Any]:
    """Shares are over the runs that are not broken; every rule counts once a run."""
    judged = [r for r in runs if not r.broken]
    alarmed = sum(bool(r.alarms) for r in judged)

    def count(name: str) -> dict[str, int]:
        return dict(Counter(cause for r in judged for cause in set(getattr(r, name))).most_common())

    return {"runs": len(judged), "false_alarm_runs": alarmed, "false_alarm_share": alarmed / len(judged) if judged else None,
            "silent_runs": sum(not r.alarms and not r.notes for r in judged), "alarms_by_rule": count("alarms"), "notes_by_rule": count("notes"),
            "broken": sum(bool(r.broken) for r in runs)}


def show(runs: list[Run], result: dict[str, Any]) -> None:
    loud = [(r.mark, r.case, ", ".join(r.alarms) or "–", r.broken or "; ".join(r.titles)) for r in runs if r.alarms or r.broken]
    if loud:
        harness.table("False alarms, and broken runs", ["", "case", "alarms", "what"], loud)
    if result["notes_by_rule"]:
        harness.table("Notes (no alarms)", ["rule", "runs"], list(result["notes_by_rule"].items()), right=["runs"])
    harness.table("Score", ["healthy runs", "with an alarm", "share", "silent", "broken"],
                  [(result["runs"], result["false_alarm_runs"], result["false_alarm_share"], result["silent_runs"], result["broken"])],
                  right=["healthy runs", "with an alarm", "share", "silent", "broken"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fixed subset, within five minutes")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one run")
    parser.add_argument("--only", default="", metavar="SUBSTR", help="cases whose name contains this")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the recordings there, DIR/CASE/runs")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--osler", default=f"{shlex.quote(sys.executable)} -m osler", metavar="CMD")
    options = parser.parse_args()
    cases = [p for p in sorted((HERE / "cases").glob("*.py")) if options.only in p.stem and (not options.quick or p.stem in QUICK)]
    lacking = {p.stem: name for p in cases if (name := missing(p.stem))}
    cases = [p for p in cases if p.stem not in lacking]
    if not cases:
        parser.error("no case of that name in bench/healthy/cases")
    osler, started = shlex.split(options.osler), time.perf_counter()
    runs: list[Run] = []
    skipped = 0

    def one(case: Path) -> Run | None:
        left = QUICK_SECONDS - (time.perf_counter() - started) if options.quick else float("inf")
        return run(case, osler, min(options.timeout, left), options.keep) if left > 15 else None

    with futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, found in enumerate(pool.map(one, cases), 1):
            if found is None:
                skipped += 1
                continue
            runs.append(found)
            print(f"[{number}/{len(cases)}] {found.mark:7} {found.case} {found.seconds}s {' '.join(found.alarms)}", file=sys.stderr, flush=True)
    result = {**summary(runs), "skipped_for_time": skipped, "not_installed": lacking, "seconds": round(time.perf_counter() - started, 1)}
    show(runs, result)
    for case, name in lacking.items():
        print(f"{case} was left out: {name} is not installed")
    if skipped:
        print(f"{skipped} runs not started: the five minutes of --quick were over")
    if options.json:
        harness.write(options.json, result, [{**asdict(r), "mark": r.mark} for r in runs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
