"""``osler runs``: the runs of a folder, newest first."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

HELP = "list the runs that are kept"
COLUMNS = ("run", "when", "command", "steps", "time", "end", "findings")


def add_parser(verbs: Any) -> None:
    parser = verbs.add_parser("runs", help=HELP)
    add_place(parser)
    parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON object a line")
    parser.add_argument("-n", type=int, default=20, metavar="N", help="how many at most (default: 20)")
    parser.set_defaults(main=main)


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, metavar="DIR", dest="directory", help="folder that keeps the runs (default: osler-runs, or $OSLER_DIR)")


def root(directory: Path | None) -> Path:
    """The folder to look into."""
    from osler.store import runs

    if directory is not None:
        return directory
    usual = runs.default_root(Path.cwd(), create=False)
    if usual.is_dir() or os.environ.get("OSLER_DIR"):
        return usual
    # Runs lie beside their script; from a folder above, the newest place with runs is meant.
    places = [p for depth in ("*", "*/*", "*/*/*") for p in Path.cwd().glob(f"{depth}/{usual.name}") if p.is_dir()]
    return max(places, key=lambda p: p.stat().st_mtime, default=usual)


def main(args: argparse.Namespace) -> int:
    from osler.store import runs

    where = root(args.directory)
    rows = [describe(path) for path in runs.list_runs(where)[:max(0, args.n)]]
    if args.as_json:
        print("".join(json.dumps(row) + "\n" for row in rows), end="")
    elif rows:
        print(table([cells(row) for row in rows]), end="")
    else:
        print(f"no runs under {where}. Try: osler run train.py")
    return 0


def describe(path: Path) -> dict[str, Any]:
    """One run from its small files; streams are not read, except for the number of steps of a run still going."""
    from osler.store import files, runs

    run, end, found = (files.read_json(path / name) or {} for name in ("run.json", "end.json", "findings.json"))
    command = run.get("command")
    findings = [f for f in found.get("findings") or () if isinstance(f, dict) and not f.get("explained_by")]
    counts: dict[str, int] = {}
    for finding in findings:
        counts[str(finding.get("severity"))] = counts.get(str(finding.get("severity")), 0) + 1
    started = run.get("started")
    return {"id": path.name, "path": str(path), "started": started,
            "command": " ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
            "steps": (found.get("run") or {}).get("steps"), "alive": runs.alive(path),
            "seconds": end.get("seconds"), "code": end.get("code"), "signal": end.get("signal"),
            "out_of_memory": bool(end.get("out_of_memory")), "judged": bool(found), "counts": counts,
            "causes": [f.get("cause") for f in findings]}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    command = row["command"] if len(row["command"]) <= 40 else row["command"][:37] + "..."
    if row["alive"]:
        end = "running"
    elif row["out_of_memory"]:
        end = "out of memory"
    else:
        end = row["signal"] or ("?" if row["code"] is None else f"exit {row['code']}")
    findings = ", ".join(f"{n} {severity}" for severity, n in row["counts"].items()) if row["judged"] else ""
    return (row["id"], when(row["started"]), command, "" if row["steps"] is None else str(row["steps"]),
            duration(row["seconds"]), end, findings or ("none" if row["judged"] else "-"))


def when(started: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if isinstance(started, int | float) else ""


def duration(seconds: Any) -> str:
    """``8.1 s``, ``12 min``, ``3 h 05 min``."""
    if not isinstance(seconds, int | float):
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest cell."""
    everything = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in everything) for i in range(len(COLUMNS))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in everything)
