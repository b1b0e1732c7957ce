"""JSON, JSON lines and SARIF: what other programs read."""

from __future__ import annotations

import json
import re

import pytest
import report_sample as sample

from osler.core.finding import Finding
from osler.report import sarif
from osler.report.json import render, render_lines
from osler.report.model import build

ALL = [sample.faulty, sample.healthy, sample.broken]


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


@pytest.mark.parametrize("which", ALL)
def test_the_document_holds_the_promised_fields(which) -> None:
    document = json.loads(render(build(*which())), parse_constant=refuse)
    assert document["schema"] == 1
    assert set(document) == {"schema", "run", "overhead", "findings", "not_checked", "checked", "suppressed"}
    for finding in document["findings"]:
        assert set(finding) == {"cause", "certainty", "severity", "title", "where", "when", "evidence", "explains", "explained_by", "fix",
                                "treatment", "confirmed"}
        assert set(finding["where"]) == {"file", "line", "module", "parameter", "rank", "columns", "rows", "also"}
        assert set(finding["when"]) == {"first_step", "last_step"}
    assert set(document["overhead"]) >= {"fraction", "budget"}
    assert all(set(n) == {"rule", "why"} for n in document["not_checked"])


def test_findings_survive_the_round_trip() -> None:
    document = json.loads(render(build(*sample.broken())))
    for raw in document["findings"]:
        assert json.dumps(Finding.from_json(raw).to_json()) == json.dumps(raw)


def test_a_number_that_is_none_has_its_name_beside_it() -> None:
    document = json.loads(render(build(*sample.broken())))
    evidence = document["findings"][0]["evidence"][0]
    assert evidence["value"] is None
    assert evidence["value_text"] == "inf"


def test_the_order_is_the_ranking() -> None:
    causes = [f["cause"] for f in json.loads(render(build(*sample.faulty())))["findings"]]
    assert causes == ["grad-not-cleared", "eval-mode-missing", "no-workers", "nondeterminism", "exploding-gradients", "loss-diverged"]


def test_lines_are_one_item_each() -> None:
    model = build(*sample.faulty())
    rows = [json.loads(line, parse_constant=refuse) for line in render_lines(model).splitlines()]
    assert [r["type"] for r in rows] == ["run"] + ["finding"] * 6 + ["not_checked"] * 6
    assert [r["cause"] for r in rows if r["type"] == "finding"] == [f["cause"] for f in model["findings"]]


@pytest.mark.parametrize("which", ALL)
def test_sarif_has_the_shape_of_the_standard(which) -> None:
    document = json.loads(sarif.render(build(*which())), parse_constant=refuse)
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-2.1.0.json")
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "osler"
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"] and rule["help"]["markdown"]
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
        assert re.fullmatch(r"[A-Za-z0-9]+", rule["name"])
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        for place in result.get("locations", []) + result.get("relatedLocations", []):
            if "physicalLocation" not in place:
                continue
            artifact = place["physicalLocation"]["artifactLocation"]
            if "uriBaseId" in artifact:
                assert artifact["uriBaseId"] in run["originalUriBaseIds"]
                assert not artifact["uri"].startswith("/") and "\\" not in artifact["uri"]
            assert place["physicalLocation"]["region"]["startLine"] >= 1
    assert all(base["uri"].startswith("file:///") and base["uri"].endswith("/") for base in run["originalUriBaseIds"].values())
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)


def test_sarif_leaves_out_what_is_folded_and_maps_severities() -> None:
    (run,) = json.loads(sarif.render(build(*sample.faulty())))["runs"]
    assert {r["ruleId"]: r["level"] for r in run["results"]} == {
        "grad-not-cleared": "error", "eval-mode-missing": "error", "no-workers": "warning", "nondeterminism": "note"}
    assert run["results"][-1]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"


def test_sarif_names_places_outside_the_folder_as_they_are() -> None:
    assert sarif.location("/opt/a b/x.py", 3)["physicalLocation"]["artifactLocation"] == {"uri": "file:///opt/a%20b/x.py"}
    assert sarif.location("C:/a/x.py", 3)["physicalLocation"]["artifactLocation"] == {"uri": "file:///C:/a/x.py"}
    assert sarif.place("train.py:19") == ("train.py", 19)
    assert sarif.place("train.py") == ("train.py", None)
