"""The one view model behind terminal, HTML, JSON and SARIF: a plain dictionary. Not here: how any of it looks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import osler
from osler.core.finding import LOUD, SCHEMA, SEVERITIES, Finding
from osler.core.window import Window
from osler.diagnose import catalogue, causes
from osler.diagnose.engine import Verdict
from osler.diagnose.rank import rank
from osler.report import evidence, paths, series

CONTEXT = 3
"""Lines shown above and below the one a finding names."""

Model = dict[str, Any]


def build(window: Window, verdict: Verdict, extra: Sequence[Finding] = ()) -> Model:
    """Everything the views show; ``extra`` are findings of a probe, a trial or an audit."""
    directory = paths.working_directory(window.run)
    findings = rank([*verdict.findings, *extra])
    curves = series.all_series(window)
    shown = [view(f, window, directory, curves) for f in findings]
    for row in shown:
        row["why_folded"] = causes.reason(row["explained_by"], row["cause"]) if row["explained_by"] else None
    counts = {s: sum(f.severity == s and f.explained_by is None for f in findings) for s in SEVERITIES}
    model = {
        "schema": SCHEMA, "osler": osler.__version__, "run": run_info(window, directory),
        "overhead": dict(verdict.overhead),
        "verdict": sentence(window, verdict, findings),
        "counts": {**counts, "folded": sum(f.explained_by is not None for f in findings),
                   "suppressed": len(verdict.suppressed), "checked": len(verdict.checked),
                   "not_checked": len(verdict.not_checked)},
        "findings": shown,
        "suppressed": [paths.localise(f, directory).to_json() for f in verdict.suppressed],
        "not_checked": [{"rule": n.rule, "why": paths.shorten(n.why, directory)} for n in verdict.not_checked],
        "checked": list(verdict.checked),
        "series": curves,
    }
    clean: Model = finite(model)
    return clean


def view(finding: Finding, window: Window, directory: str, curves: Mapping[str, Any]) -> dict[str, Any]:
    """The finding on the wire, and beside it what a view needs: place, code, chart, meaning."""
    row = paths.localise(finding, directory).to_json()
    where = row["where"]
    row["place"] = f"{where['file']}:{where['line']}" if where["file"] and where["line"] else where["file"]
    row["meaning"] = catalogue.meaning(finding.cause)
    row["code"] = excerpt(window, finding, directory)
    row["chart"] = evidence.chart(finding, window, curves)
    return row


def excerpt(window: Window, finding: Finding, directory: str) -> dict[str, Any] | None:
    """The named line with its neighbours, as far as two blank lines; common indentation removed."""
    file, line = finding.where.file, finding.where.line
    if file is None or line is None:
        return None
    text = source(window, file, directory)
    lines = text.expandtabs(4).splitlines()
    if not 0 < line <= len(lines):
        return None
    first, last = max(1, line - CONTEXT), min(len(lines), line + CONTEXT)
    blank = [i for i in range(first, last + 1) if not lines[i - 1].strip()]
    first = max([i + 1 for i in blank if i < line and (i == first or i - 1 in blank)], default=first)
    last = min([i - 1 for i in blank if i > line and (i == last or i + 1 in blank)], default=last)
    picked = [t.rstrip() for t in lines[first - 1: last]]
    indent = min((len(t) - len(t.lstrip()) for t in picked if t), default=0)
    return {"file": paths.relative(file, directory), "line": line,
            "lines": [{"n": first + i, "text": t[indent:], "guilty": first + i == line} for i, t in enumerate(picked)]}


def source(window: Window, file: str, directory: str) -> str:
    for name in (file, paths.relative(file, directory), paths.absolute(file, directory)):
        if name in window.sources:
            return window.sources[name]
    return ""


def run_info(window: Window, directory: str) -> dict[str, Any]:
    """What ran, in the words of ``run.json``, with the fields the views need under fixed names."""
    run = dict(window.run)
    attached = window.last("attached")
    command = run.get("command") or (attached.get("argv") if attached else None) or []
    words = command if isinstance(command, list | tuple) else [str(command)]
    main = (attached.get("main") if attached else None) or next((w for w in words if str(w).endswith(".py")), None)
    end = window.end
    seconds = end.seconds if end is not None and end.seconds is not None else (
        float(window.steps["t"][-1]) if len(window.steps) else None)
    return {
        "id": run.get("id") or run.get("run"), "script": paths.relative(str(main), directory) if main else None,
        "command": " ".join(paths.shorten(str(w), directory) for w in words), "directory": Path(directory).as_posix(),
        "started": run.get("started"), "seconds": seconds, "steps": window.n_steps, "rank": window.rank,
        "guarded": max((int(f.get("skipped", 0)) for f in window.facts("guarded")), default=0),
        "ranks": run.get("ranks") or run.get("world_size"),
        "torch": run.get("torch") or (attached.get("torch") if attached else None),
        "python": run.get("python") or (attached.get("python") if attached else None), "device": run.get("device"),
        "end": None if end is None else {"code": end.code, "signal": end.signal, "out_of_memory": end.out_of_memory},
    }


def sentence(window: Window, verdict: Verdict, findings: Sequence[Finding]) -> dict[str, Any]:
    """The verdict as a state and one line."""
    own = [f for f in findings if f.explained_by is None]
    loud = [f for f in own if f.severity in LOUD]
    steps = f"{window.n_steps:,} step{'s' if window.n_steps != 1 else ''}".replace(",", " ")
    ended = window.last("exception")
    if window.n_steps == 0 and not own and window.final and ended is not None:
        state, text = "unjudged", f"nothing was trained: {ended.get('type', 'an exception')} before the first step"
    elif loud:
        state, text = "fault", f"{len(loud)} fault{'s' if len(loud) > 1 else ''} found in {steps}"
    elif not verdict.checked and verdict.not_checked and not findings:
        state, text = "unjudged", f"no judgement: nothing could be checked in {steps}"
    elif own:
        state, text = "remarks", f"no fault found in {steps}, {len(own)} remark{'s' if len(own) > 1 else ''}"
    else:
        state, text = "healthy", f"no fault found in {steps}"
    return {"state": state, "text": text if window.final else f"{text} so far"}


def finite(value: Any) -> Any:
    """The same structure with numbers JSON can hold: a non-finite one is ``None`` with its name in ``<key>_text`` beside it."""
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            result[str(key)] = finite(item)
            if isinstance(item, float) and not math.isfinite(item):
                result[f"{key}_text"] = str(item)
        return result
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return finite(value.item()) if hasattr(value, "item") else str(value)
