"""Scores osler on folders of cases (``NAME/train.py``, ``fixed.py``, ``truth.json``), faulty and repaired.

usage: python bench/zoo/run.py [FOLDER ...] [--quick] [--identity] [--jobs 2] [--only SUBSTR] [--json OUT] [--osler CMD]

Without folders: ``../shared/zoo`` beside the repository when present, and ``examples/broken``. ``--quick`` runs a fixed subset
and ends within five minutes. With ``--identity`` every script is also run alone, and what it prints and the hashes of its final parameters and
random states must be the same; lines that differ between two runs alone (clocks, unseeded draws) do not count. The rules of scoring are in ``score.py``.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import harness  # noqa: E402
from score import Verdict, judge, summary  # noqa: E402

QUICK = frozenset({
    "a01_softmax_before_ce", "a03_manual_log_of_softmax", "a04_missing_zero_grad", "a06_optimizer_stale_model",
    "a08_layers_in_python_list", "a09_detached_encoder", "a11_frozen_random_backbone", "a18_lr_too_low",
    "a37_dice_loss_empty_mask", "a49_fully_masked_row_nan", "a52_strict_false_prefix", "a62_where_nan_gradient",
    "b02_eval_missing_batchnorm", "b18_val_not_normalised", "a71_clean_long_plateau", "a73_clean_sparse_embedding",
    "a77_clean_distillation", "a79_clean_early_stopped_finetune", "h54_complex_float64", "h78_mc_dropout_eval",
    "double_activation", "optimizer_before_model", "eval_mode_missing",
})
QUICK_SECONDS = 270.0
WITNESS = Path(__file__).resolve().parent / "witness"


@dataclass(frozen=True)
class Job:
    case: Path
    script: str
    truth: dict[str, Any]
    faulty: bool

    @property
    def expected_seconds(self) -> float:
        """From the case's own record, to start the long ones first."""
        seen = (self.truth.get("observed") or {}).get("train" if self.faulty else "fixed") or {}
        return float(seen.get("cpu_seconds") or seen.get("wall_seconds") or 5.0) if isinstance(seen, dict) else 5.0


def jobs_in(folder: Path, only: str, quick: bool) -> list[Job]:
    found = []
    for path in sorted(folder.glob("*/truth.json")):
        case, truth = path.parent, json.loads(path.read_text())
        if only not in case.name or (quick and case.name not in QUICK):
            continue
        clean = truth["kind"] == "clean"
        found.append(Job(case, "train.py", truth, not clean))
        if not clean and (case / "fixed.py").exists():
            found.append(Job(case, "fixed.py", truth, False))
    return found


def run(job: Job, osler: list[str], timeout: float, identity: bool = False) -> Verdict:
    """Runs one script in a private copy of its folder (without the answer) and judges what osler wrote."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="zoo-", ignore_cleanup_errors=True) as name:
        work, out = Path(name) / "work", Path(name) / "findings.json"
        fresh(job.case, work)
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        if identity:
            env.update(PYTHONPATH=os.pathsep.join([str(WITNESS), *filter(None, [env.get("PYTHONPATH")])]), ZOO_WITNESS=str(Path(name) / "watched"), ZOO_SCRIPT=job.script,
                       PYTHONHASHSEED="0")
        code, stdout, stderr = finish([*osler, "run", "--json", str(out), job.script], work, env, timeout)
        seconds = time.perf_counter() - started
        same = alike(job, Path(name), env, timeout, stdout) if identity else None
        document: dict[str, Any] = {}
        broken = None
        try:
            document = json.loads(out.read_text())
            fields = judge(job.truth, document["findings"], job.faulty)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            broken, fields = f"{type(e).__name__}: {str(e).replace(name, '.')}", judge(job.truth, [], job.faulty)
        fraction = (document.get("overhead") or {}).get("fraction") if not broken else None
        return Verdict(job.case.name, job.script, job.truth["group"], job.faulty, broken=broken, exit=code,
                       seconds=round(seconds, 1), identical=same, overhead=fraction, stderr=stderr[-1500:] if broken else "", **fields)


def fresh(case: Path, work: Path) -> None:
    """A private copy of the case without its answer."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for item in case.iterdir():
        if item.name not in ("truth.json", "osler-runs") and not item.name.startswith("__"):
            (shutil.copytree if item.is_dir() else shutil.copy)(item, work / item.name)


def alike(job: Job, place: Path, env: dict[str, str], timeout: float, printed: str) -> bool | None:
    """Whether the watched run printed and became what the script does alone; ``None`` where two runs alone differ in all that could tell."""
    def alone(name: str) -> tuple[list[str], str]:
        fresh(job.case, place / "work")
        witness = place / name
        text = finish([sys.executable, job.script], place / "work", {**env, "ZOO_WITNESS": str(witness)}, timeout)[1]
        return text.splitlines(), witness.read_text() if witness.exists() else ""

    watched, said = (place / "watched").read_text() if (place / "watched").exists() else "", printed.splitlines()
    lines, final = alone("first")
    if (lines, final) == (said, watched):
        return True
    again, second = alone("second")
    one, two, other = (*lines, *final.split()), (*again, *second.split()), (*said, *watched.split())
    if len(one) != len(two):
        return None
    steady = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a == b]
    return len(one) == len(other) and all(other[i] == one[i] for i in steady) if steady else None


def finish(command: list[str], work: Path, env: dict[str, str], timeout: float) -> tuple[int | str, str, str]:
    """Exit code (or "timeout"), stdout and stderr; a run over time is ended with all of its children."""
    process = subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        return process.returncode, stdout, stderr
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        return "timeout", stdout, stderr


def show(verdicts: list[Verdict], result: dict[str, Any]) -> None:
    rows = [(v.mark, f"{v.case}/{v.script}", ", ".join(v.wanted), ", ".join(v.said[:5]) or "-",
             "" if v.line is None else ", ".join(v.lines_said) + ("" if v.line else " (off)"), v.seconds)
            for v in verdicts if v.faulty]
    harness.table("Faulty scripts", ["", "case", "true cause", "said", "line", "s"], rows, right=["s"])
    loud = [(v.mark, f"{v.case}/{v.script}", ", ".join(v.alarms), v.broken) for v in verdicts
            if (v.alarms and not v.faulty) or v.broken]
    if loud:
        harness.table("Healthy scripts with an alarm, and broken runs", ["", "case", "alarms", "broken"], loud)
    columns = ["group", "faults", "first", "named", "missed", "line", "healthy", "false alarms", "notes only", "broken"]
    parts = {**result["groups"], "wiring+evaluation+numerics": result["structural"], "all": result}
    harness.table("Score", columns,
                  [(name, t["faults"], share(t["first"], t["faults"]), share(t["named"], t["faults"]), t["faults"] - t["named"],
                    share(t["line"], t["line_of"]), t["healthy"], t["false_alarm_runs"], t["quiet_runs"], t["broken"])
                   for name, t in parts.items()], right=columns[1:])


def share(part: int, whole: int) -> str:
    return f"{part}/{whole} {100 * part / whole:3.0f}%" if whole else "–"


def default_folders() -> list[Path]:
    zoo = harness.ROOT.parent / "shared" / "zoo"
    return [*([zoo] if zoo.is_dir() else []), harness.ROOT / "examples" / "broken"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="a fixed subset, within five minutes")
    parser.add_argument("--identity", action="store_true", help="also run every script alone and compare")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one run")
    parser.add_argument("--only", default="", metavar="SUBSTR", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--osler", default=f"{shlex.quote(sys.executable)} -m osler", metavar="CMD")
    options = parser.parse_args()
    jobs = [job for folder in options.folders or default_folders() for job in jobs_in(folder, options.only, options.quick)]
    if not jobs:
        parser.error("no case (a folder with train.py and truth.json) found")
    jobs.sort(key=lambda job: -job.expected_seconds)
    osler, started = shlex.split(options.osler), time.perf_counter()
    verdicts, skipped = [], 0

    def one(job: Job) -> Verdict | None:
        left = QUICK_SECONDS - (time.perf_counter() - started) if options.quick else float("inf")
        return run(job, osler, min(options.timeout, left), options.identity) if left > 20 else None

    with futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, verdict in enumerate(pool.map(one, jobs), 1):
            if verdict is None:
                skipped += 1
                continue
            verdicts.append(verdict)
            print(f"[{number}/{len(jobs)}] {verdict.mark:7} {verdict.case}/{verdict.script} {verdict.seconds}s",
                  file=sys.stderr, flush=True)
    verdicts.sort(key=lambda v: (not v.faulty, v.group, v.case))
    compared = [v.identical for v in verdicts if v.identical is not None]
    same = {"identity": {"compared": len(compared), "identical": sum(compared), "unsteady_alone": len(verdicts) - len(compared)}} if options.identity else {}
    result = {**summary(verdicts), **same, "skipped_for_time": skipped, "seconds": round(time.perf_counter() - started, 1)}
    show(verdicts, result)
    if options.identity:
        print(f"identical alone and watched: {sum(compared)} of {len(compared)}; differing: {', '.join(f'{v.case}/{v.script}' for v in verdicts if v.identical is False) or 'none'}; "
              f"unsteady alone: {len(verdicts) - len(compared)}")
    if skipped:
        print(f"{skipped} runs not started: the five minutes of --quick were over")
    if options.json:
        harness.write(options.json, result, [{**asdict(v), "mark": v.mark} for v in verdicts])
    return 0


if __name__ == "__main__":
    sys.exit(main())
