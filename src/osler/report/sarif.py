"""SARIF 2.1.0, the form that code hosts and editors read. Folded findings are left out: they are nothing to change."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from osler.diagnose import catalogue
from osler.diagnose.meanings import GROUP

SCHEMA_URI = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"fatal": "error", "harmful": "error", "wasteful": "warning", "note": "note"}
PRECISION = {"certain": "very-high", "measured": "high", "suspected": "medium"}


def render(model: dict[str, Any]) -> str:
    shown = [f for f in model["findings"] if f["explained_by"] is None]
    ids = list(dict.fromkeys(f["cause"] for f in shown))
    end = model["run"].get("end")
    document = {
        "$schema": SCHEMA_URI, "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {"name": "osler", "version": model["osler"], "semanticVersion": model["osler"],
                                "rules": [rule(cause, shown) for cause in ids]}},
            "columnKind": "unicodeCodePoints",
            "originalUriBaseIds": {"WORKDIR": {"uri": base(model["run"]["directory"])}},
            "invocations": [{
                "executionSuccessful": True, "commandLine": model["run"]["command"],
                "properties": {"exitCodeOfTheScript": end["code"] if end else None},
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": f"not checked: {n['rule']}: {n['why']}"}} for n in model["not_checked"]]}],
            "results": [result(f, ids.index(f["cause"])) for f in shown]}]}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def rule(cause: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    own = next(f for f in findings if f["cause"] == cause)
    page = catalogue.explain(cause) if cause in catalogue.known() else own["title"]
    short = catalogue.meaning(cause) or own["title"]
    return {"id": cause, "name": "".join(word.capitalize() for word in cause.split("-")),
            "shortDescription": {"text": short}, "fullDescription": {"text": short},
            "help": {"text": page, "markdown": page},
            "defaultConfiguration": {"level": LEVELS[own["severity"]]},
            "properties": {"tags": [GROUP.get(cause, "other")], "precision": PRECISION[own["certainty"]]}}


def result(finding: dict[str, Any], index: int) -> dict[str, Any]:
    lines = [finding["title"], f"Fix: {finding['fix']}", *(e["text"] for e in finding["evidence"])]
    row: dict[str, Any] = {
        "ruleId": finding["cause"], "ruleIndex": index, "level": LEVELS[finding["severity"]], "kind": "fail",
        "message": {"text": "\n".join(line for line in lines if line)},
        "properties": {key: finding[key] for key in ("certainty", "severity", "when", "treatment", "explains")}}
    where = finding["where"]
    if where["file"]:
        row["locations"] = [location(where["file"], where["line"])]
        row["partialFingerprints"] = {"oslerFinding/v1": f"{finding['cause']}:{where['file']}:{where['module'] or ''}"}
    named = where["parameter"] or where["module"]
    if named:
        row.setdefault("locations", [{}])[0]["logicalLocations"] = [{"fullyQualifiedName": named, "kind": "module"}]
    related = [(i, *place(also)) for i, also in enumerate(where["also"], 1)]
    if related:
        row["relatedLocations"] = [{"id": i, **location(file, line)} for i, file, line in related]
    return row


def place(text: str) -> tuple[str, int | None]:
    """``file:line`` taken apart; a text without a line is a file."""
    file, colon, line = text.rpartition(":")
    return (file, int(line)) if colon and line.isdigit() else (text, None)


def location(file: str, line: int | None) -> dict[str, Any]:
    absolute = file.startswith("/") or file[1:3] == ":/"
    artifact = {"uri": base(file).rstrip("/")} if absolute else {"uri": quote(file), "uriBaseId": "WORKDIR"}
    physical: dict[str, Any] = {"artifactLocation": artifact}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical}


def base(directory: str) -> str:
    path = directory.rstrip("/")
    return f"file://{'' if path.startswith('/') else '/'}{quote(path, safe='/:')}/"
