"""Mutation bench: faults edited into healthy scripts by the operators of ``faults_*.py``; does osler name those that hurt?

usage: python bench/mutants/run.py [--quick] [--per-operator 7] [--jobs 2] [--only SUBSTR] [--json OUT] [--keep DIR]

Every subject in ``subjects/`` is run five times with different seeds, unwatched. A mutant is run once under ``osler run`` and is kept
when it hurts: its metric is worse than the mean of the controls by more than two of their standard deviations, or it crashes, or
prints no finite metric. Of the kept ones the share is reported whose cause (or declared equivalent) is among the first three findings that
no other explains. The subjects themselves, watched, must raise no alarm. ``--per-operator`` mutants are drawn evenly over
subjects and variants (all of them with 0).
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import importlib
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import harness  # noqa: E402
from script import OPERATORS, Mutant, Script, mutants  # noqa: E402

for _family in ("loop", "loss", "model", "data"):
    importlib.import_module(f"faults_{_family}")

SEEDS = 5
SIGMAS = 2.0
LOUD = ("fatal", "harmful")


@dataclass(frozen=True)
class Control:
    """Metrics of the healthy subject: ``sign`` is 1 where higher is better."""

    sign: int
    mean: float
    sigma: float

    def hurt_by(self, metric: float | None) -> float:
        """By how many standard deviations a metric is worse; infinite for one that is missing or not finite."""
        if metric is None or not math.isfinite(metric):
            return math.inf
        return self.sign * (self.mean - metric) / max(self.sigma, 1e-12)


def metric_of(stdout: str) -> tuple[int, float] | None:
    for line in reversed(stdout.splitlines()):
        words = line.split()
        if len(words) == 3 and words[0] == "METRIC":
            try:
                return (1 if words[1] == "higher" else -1), float(words[2])
            except ValueError:
                return None
    return None


def execute(command: list[str], work: Path, timeout: float) -> str:
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    try:
        return subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=timeout, errors="replace", check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def control(script: Script, timeout: float) -> Control:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        (Path(name) / "train.py").write_text(script.text)
        found = [metric_of(execute([sys.executable, "train.py", str(seed)], Path(name), timeout)) for seed in range(SEEDS)]
    values = [m[1] for m in found if m is not None]
    if len(values) < SEEDS:
        raise SystemExit(f"{script.name}: a control run printed no metric")
    return Control(found[0][0], statistics.mean(values), statistics.stdev(values))  # type: ignore[index]


def watched(source: str, osler: list[str], timeout: float, keep: Path | None) -> tuple[float | None, list[dict[str, Any]], str | None]:
    """Metric, findings that nothing explains, and what was broken about osler's answer."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        (work / "train.py").write_text(source)
        more = ["--dir", str(keep)] if keep is not None else []
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(work / "train.py", keep)
        stdout = execute([*osler, "run", *more, "--json", "findings.json", "train.py", "0"], work, timeout)
        metric = metric_of(stdout)
        try:
            findings = json.loads((work / "findings.json").read_text())["findings"]
        except (OSError, ValueError, KeyError) as error:
            return metric and metric[1], [], f"{type(error).__name__}: {error}"
        return metric and metric[1], [f for f in findings if not f.get("explained_by")], None


def drawn(every: list[tuple[str, Mutant]], count: int) -> list[tuple[str, Mutant]]:
    """``count`` of them, spread evenly over the list, which is ordered by variant and then by subject."""
    if count <= 0 or len(every) <= count:
        return every
    if count == 1:
        return [every[len(every) // 2]]
    return [every[round(i * (len(every) - 1) / (count - 1))] for i in range(count)]


def judge(subject: str, mutant: Mutant, base: Control, outcome: tuple[float | None, list[dict[str, Any]], str | None]) -> dict[str, Any]:
    metric, found, broken = outcome
    hurt = base.hurt_by(metric)
    said = [f["cause"] for f in found]
    named = [f for f in found[:3] if f["cause"] in mutant.causes]
    lines = [(f.get("where") or {}).get("line") for f in named]
    return {"subject": subject, "operator": mutant.operator, "variant": mutant.variant, "causes": list(mutant.causes), "metric": metric,
            "control": base.mean, "sigma": base.sigma, "hurt": None if math.isinf(hurt) else round(hurt, 1), "kept": hurt > SIGMAS, "said": said[:5],
            "named": bool(named), "first": bool(said) and said[0] in mutant.causes, "lines": list(mutant.lines),
            "line": any(line is not None and abs(line - own) <= 3 for line in lines for own in mutant.lines), "broken": broken}


def share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def summary(rows: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [r for r in rows if r["kept"]]
    by = {}
    for name in OPERATORS:
        mine = [r for r in rows if r["operator"] == name]
        hurt = [r for r in mine if r["kept"]]
        by[name] = {"generated": len(mine), "kept": len(hurt), "named": sum(r["named"] for r in hurt), "first": sum(r["first"] for r in hurt),
                    "named_share": share(sum(r["named"] for r in hurt), len(hurt))}
    return {"generated": len(rows), "kept": len(kept), "discarded": len(rows) - len(kept), "named": sum(r["named"] for r in kept),
            "named_share": share(sum(r["named"] for r in kept), len(kept)), "first_share": share(sum(r["first"] for r in kept), len(kept)),
            "line_share": share(sum(r["line"] for r in kept if r["named"]), sum(r["named"] for r in kept)), "broken": sum(r["broken"] is not None for r in rows),
            "healthy_runs": len(healthy), "healthy_alarms": sum(bool(r["alarms"]) for r in healthy), "by_operator": by}


def show(result: dict[str, Any], rows: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> None:
    missed = [(r["operator"], r["variant"], r["subject"], r["causes"][0], ", ".join(r["said"]) or "-", "crash" if r["metric"] is None else r["hurt"])
              for r in rows if r["kept"] and not r["named"]]
    harness.table("Mutants that hurt and were not named", ["operator", "variant", "subject", "true cause", "said", "sigmas"], missed, right=["sigmas"])
    loud = [(r["subject"], r["seed"], ", ".join(r["alarms"])) for r in healthy if r["alarms"]]
    if loud:
        harness.table("Alarms on the subjects themselves", ["subject", "seed", "alarms"], loud)
    by = result["by_operator"]
    harness.table("By operator", ["operator", "generated", "kept", "named", "first", "share"],
                  [(name, v["generated"], v["kept"], v["named"], v["first"], "–" if v["named_share"] is None else f"{100 * v['named_share']:.0f} %")
                   for name, v in sorted(by.items(), key=lambda item: item[1]["named_share"] or 0)], right=["generated", "kept", "named", "first", "share"])
    print(f"generated {result['generated']}, kept {result['kept']}, discarded {result['discarded']}; named {result['named']} of {result['kept']} "
          f"({result['named_share']}), first {result['first_share']}, line {result['line_share']}; "
          f"alarms on {result['healthy_alarms']} of {result['healthy_runs']} healthy runs; broken {result['broken']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one mutant of each operator, within five minutes")
    parser.add_argument("--per-operator", type=int, default=7, metavar="N")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--only", default="", metavar="SUBSTR", help="operators whose name contains this")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep every mutant and its recording there")
    parser.add_argument("--osler", default=f"{shlex.quote(sys.executable)} -m osler", metavar="CMD")
    options = parser.parse_args()
    scripts = [Script(path.stem, path.read_text()) for path in sorted((HERE / "subjects").glob("*.py"))]
    osler, started = shlex.split(options.osler), time.perf_counter()
    every: dict[str, list[tuple[str, Mutant]]] = {name: [] for name in OPERATORS}
    for script in scripts:
        for mutant in mutants(script):
            every[mutant.operator].append((script.name, mutant))
    count = 1 if options.quick else options.per_operator
    chosen = [pair for name, pairs in every.items() if options.only in name
              for pair in drawn(sorted(pairs, key=lambda pair: (pair[1].variant, pair[0])), count)]
    wanted = {subject for subject, _ in chosen}
    rows: list[dict[str, Any]] = []
    healthy: list[dict[str, Any]] = []
    with futures.ThreadPoolExecutor(options.jobs) as pool:
        bases = dict(zip(sorted(wanted), pool.map(lambda s: control(s, options.timeout), [s for s in scripts if s.name in wanted]), strict=True))

        def place(subject: str, mutant: Mutant | None) -> Path | None:
            if options.keep is None:
                return None
            label = "healthy" if mutant is None else f"{mutant.operator}+{mutant.variant}".replace("/", "_").replace(" ", "_")
            return Path(options.keep).resolve() / f"{label}+{subject}"

        def one(pair: tuple[str, Mutant]) -> dict[str, Any] | None:
            if options.quick and time.perf_counter() - started > 250:
                return None
            return judge(*pair, bases[pair[0]], watched(pair[1].source, osler, options.timeout, place(*pair)))

        rows = list(told(pool.map(one, chosen), len(chosen)))
        for script, outcome in zip(scripts, pool.map(lambda s: watched(s.text, osler, options.timeout, place(s.name, None)), scripts), strict=True):
            healthy.append({"subject": script.name, "seed": 0, "alarms": [f["cause"] for f in outcome[1] if f["severity"] in LOUD], "broken": outcome[2]})
    result = {**summary(rows, healthy), "subjects": len(scripts), "available": sum(map(len, every.values())), "seconds": round(time.perf_counter() - started, 1)}
    show(result, rows, healthy)
    if options.json:
        harness.write(options.json, result, rows, healthy=healthy)
    return 0


def told(outcomes: Iterable[dict[str, Any] | None], total: int) -> Iterable[dict[str, Any]]:
    for number, row in enumerate(outcomes, 1):
        if row is not None:
            mark = "-" if not row["kept"] else "first" if row["first"] else "named" if row["named"] else "MISS"
            print(f"[{number}/{total}] {mark:6} {row['operator']} {row['variant']} {row['subject']}: {', '.join(row['said'][:3]) or '-'}", file=sys.stderr, flush=True)
            yield row


if __name__ == "__main__":
    sys.exit(main())
