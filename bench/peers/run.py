"""Peers on the cases of the zoo, side by side: torch-audit, torchmortem, trainproof, training-doctor.

usage: python bench/peers/run.py [FOLDER ...] [--quick] [--only SUBSTR] [--jobs 2] [--json OUT]

Each peer is installed into an environment of its own under ``bench/peers/.env`` (torch and numpy are this interpreter's) and attached by
``attach.py`` as its README says; readers of logs get loss, rate and gradient norm of every step. ``reading.py`` says how findings are read,
generously. *Named*: some finding can be taken for the true cause. *Strictly*: and none of that kind is left on the repaired script.
*Alarm*: a warning or worse on a repaired or healthy script, hints on style and speed aside. osler's row comes from ``bench/results/zoo.json`` over the same cases.
"""

from __future__ import annotations

import argparse
import concurrent.futures as futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import harness  # noqa: E402
import reading  # noqa: E402

PEERS = ("torch-audit", "torchmortem", "trainproof", "training-doctor")
NEEDED = {"torch-audit": ["click", "rich"], "torchmortem": ["plotly", "jinja2"]}
QUICK = ("a01", "a04", "a09", "a18", "b02", "b23", "a71", "b60")


def environment(peer: str) -> Path | None:
    """Python of the peer's environment, made if need be; ``None`` where it does not install."""
    place = HERE / ".env" / peer
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        venv.create(place, with_pip=True, clear=True)
        site = next((place / "lib").glob("python*/site-packages"))
        (site / "shared.pth").write_text(str(Path(numpy.__file__).resolve().parents[1]) + "\n")
        done = subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", peer], capture_output=True, text=True, check=False)
        if done.returncode == 0 and NEEDED.get(peer):
            done = subprocess.run([python, "-m", "pip", "install", "-q", *NEEDED[peer]], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{peer} does not install: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}", file=sys.stderr)
            return None
        (place / "ready").touch()
    return python


def call(command: list[Any], work: Path, timeout: float) -> str:
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    try:
        return subprocess.run([str(c) for c in command], cwd=work, env=env, capture_output=True, text=True, timeout=timeout, errors="replace", check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def answer(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {"findings": found}
    except (OSError, ValueError) as error:
        return {"findings": [], "broken": f"{type(error).__name__}"}


def examine(case: Path, script: str, pythons: dict[str, Path], timeout: float) -> dict[str, dict[str, Any]]:
    """What every peer says of one script."""
    said: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        for item in case.iterdir():
            if item.name != "truth.json" and not item.name.startswith("__"):
                (shutil.copytree if item.is_dir() else shutil.copy)(item, work / item.name)
        for peer in ("torch-audit", "torchmortem"):
            if peer in pythons:
                call([pythons[peer], HERE / "attach.py", peer, f"{peer}.json", script], work, timeout)
                said[peer] = answer(work / f"{peer}.json")
        if {"trainproof", "training-doctor"} & set(pythons):
            call([sys.executable, HERE / "attach.py", "log", "log.json", script], work, timeout)
            table = work / "peer-log.csv"
            if "training-doctor" in pythons:
                call([pythons["training-doctor"], HERE / "attach.py", "training-doctor", "doctor.json", table], work, timeout)
                said["training-doctor"] = answer(work / "doctor.json")
            if "trainproof" in pythons:
                text = call([pythons["trainproof"], "-m", "trainproof", "epoch", "--format", "csv", "--json", table], work, timeout)
                said["trainproof"] = proof(text)
    return said


def proof(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {"findings": [], "broken": "no JSON"}
    rows = [f for report in document.get("reports", []) for f in report.get("findings", [])]
    return {"findings": [{"id": r["id"], "title": r.get("message", ""), "level": r.get("level", "")} for r in rows]}


def tally(peer: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    faults = [r for r in rows if r["faulty"] and peer in r["said"]]
    healthy = [r for r in rows if not r["faulty"] and peer in r["said"]]
    twins = {r["case"]: r["said"][peer] for r in healthy if r["script"] == "fixed.py"}
    named = strict = 0
    for row in faults:
        right = [f for f in row["said"][peer]["findings"] if set(reading.causes(peer, f)) & set(row["wanted"])]
        named += bool(right)
        left = {f["id"] for f in twins.get(row["case"], {"findings": []})["findings"]}
        strict += any(f["id"] not in left for f in right)
    alarms = sum(any(reading.alarm(peer, f) for f in r["said"][peer]["findings"]) for r in healthy)
    every = [*faults, *healthy]
    return {"faults": len(faults), "named": named, "strictly": strict, "healthy": len(healthy), "alarm_runs": alarms,
            "broken": sum(bool(r["said"][peer].get("broken") or r["said"][peer].get("trouble")) for r in every)}


def ours(cases: set[str]) -> dict[str, Any] | None:
    path = harness.ROOT / "bench" / "results" / "zoo.json"
    if not path.is_file():
        return None
    rows = [r for r in json.loads(path.read_text())["rows"] if r["case"] in cases]
    faults, healthy = [r for r in rows if r["faulty"]], [r for r in rows if not r["faulty"]]
    return {"faults": len(faults), "named": sum(r["named"] for r in faults), "strictly": sum(r["named"] for r in faults), "healthy": len(healthy),
            "alarm_runs": sum(bool(r["alarms"]) for r in healthy), "broken": sum(r["broken"] is not None for r in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="eight cases")
    parser.add_argument("--only", default="", metavar="SUBSTR")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one run of one peer")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    pythons = {peer: python for peer in PEERS if (python := environment(peer)) is not None}
    jobs = []
    zoo = harness.ROOT.parent / "shared" / "zoo"
    for folder in options.folders or [*([zoo] if zoo.is_dir() else []), harness.ROOT / "examples" / "broken"]:
        for path in sorted(folder.glob("*/truth.json")):
            case, truth = path.parent, json.loads(path.read_text())
            if options.only not in case.name or (options.quick and not case.name.startswith(QUICK)):
                continue
            clean = truth["kind"] == "clean"
            jobs.append((case, "train.py", truth, not clean))
            if not clean and (case / "fixed.py").exists():
                jobs.append((case, "fixed.py", truth, False))
    started, rows = time.perf_counter(), []
    with futures.ThreadPoolExecutor(options.jobs) as pool:
        pending = [(case, script, truth, faulty, pool.submit(examine, case, script, pythons, options.timeout)) for case, script, truth, faulty in jobs]
        for number, (case, script, truth, faulty, done) in enumerate(pending, 1):
            wanted = [c.replace("_", "-") for c in (truth["root_cause"], *(truth.get("accept") or []))]
            rows.append({"case": case.name, "script": script, "faulty": faulty, "wanted": wanted, "said": done.result()})
            print(f"[{number}/{len(jobs)}] {case.name}/{script}", file=sys.stderr, flush=True)
    summary: dict[str, Any] = {peer: tally(peer, rows) for peer in pythons}
    own = ours({r["case"] for r in rows})
    if own is not None:
        summary["osler"] = own
    harness.table("Peers on the same cases", ["tool", "faults", "cause named", "strictly", "healthy", "with an alarm", "broken"],
                  [(name, v["faults"], v["named"], v["strictly"], v["healthy"], v["alarm_runs"], v["broken"]) for name, v in summary.items()],
                  right=["faults", "cause named", "strictly", "healthy", "with an alarm", "broken"])
    if options.json:
        harness.write(options.json, {"tools": summary, "not_installed": [p for p in PEERS if p not in pythons], "seconds": round(time.perf_counter() - started, 1)}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
