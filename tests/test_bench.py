"""The benchmarks' own arithmetic, with a stand-in for osler that says what a case file tells it to say."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "zoo"), str(ROOT / "bench" / "overhead")]
import analyse  # noqa: E402
import harness  # noqa: E402
import score  # noqa: E402

STAND_IN = """
import json, pathlib, sys
out, script = sys.argv[3], pathlib.Path(sys.argv[4])
said = pathlib.Path("said.json")
if said.exists():
    pathlib.Path(out).write_text(json.dumps({"findings": json.loads(said.read_text())[script.name]}))
"""


def finding(cause: str, line: int | None = None, severity: str = "harmful", explained_by: str | None = None) -> dict:
    return {"cause": cause, "severity": severity, "explained_by": explained_by, "where": {"file": "train.py", "line": line}}


@pytest.mark.parametrize(("findings", "first", "named", "line"), [
    ([finding("grad-not-cleared", 23)], True, True, True),
    ([finding("grad-not-cleared", 24)], True, True, False),
    ([finding("lr-too-high"), finding("grad-not-cleared", 20)], False, True, True),
    ([finding("a"), finding("b"), finding("c"), finding("grad-not-cleared", 20)], False, False, False),
    ([finding("lr-too-high", explained_by="grad-not-cleared"), finding("grad-not-cleared", 20)], True, True, True),
    ([finding("also-fine", None)], True, True, False),
    ([], False, False, False),
])
def test_judging_a_faulty_run(findings: list, first: bool, named: bool, line: bool) -> None:
    truth = {"root_cause": "grad_not_cleared", "accept": ["also-fine"], "fault_lines": [[20, 20]]}
    said = score.judge(truth, findings, True)
    assert (said["first"], said["named"], said["line"]) == (first, named, line)


def test_only_loud_findings_are_alarms() -> None:
    said = score.judge({"root_cause": "x"}, [finding("a"), finding("b", severity="note"), finding("c", explained_by="a")], False)
    assert (said["alarms"], said["quiet"]) == (("a",), ("b",))


def test_zoo_command_from_cases_to_json(tmp_path: Path) -> None:
    cases = {
        "good": {"train.py": [finding("x", 1)], "fixed.py": []},
        "noisy": {"train.py": [finding("y")], "fixed.py": [finding("y")]},
        "silent": None,
    }
    for name, said in cases.items():
        case = tmp_path / "cases" / name
        case.mkdir(parents=True)
        for script in ("train.py", "fixed.py"):
            (case / script).touch()
        (case / "truth.json").write_text(json.dumps({"root_cause": "x", "group": "wiring", "kind": "fault", "fault_lines": [[1, 1]]}))
        if said is not None:
            (case / "said.json").write_text(json.dumps(said))
    stand_in, out = tmp_path / "stand_in.py", tmp_path / "out.json"
    stand_in.write_text(STAND_IN)
    subprocess.run([sys.executable, ROOT / "bench" / "zoo" / "run.py", tmp_path / "cases", "--json", out,
                    "--osler", shlex.join([sys.executable, str(stand_in)])], check=True, capture_output=True)
    result = json.loads(out.read_text())
    expected = {"faults": 3, "first": 1, "named": 1, "line": 1, "line_of": 3, "healthy": 3, "false_alarm_runs": 1, "broken": 2}
    assert {k: result["summary"]["groups"]["wiring"][k] for k in expected} == expected
    assert str(tmp_path) not in json.dumps(result["rows"])


def test_bootstrap_interval_holds_the_median() -> None:
    median, low, high = harness.bootstrap_median(np.random.default_rng(0).normal(1.0, 0.1, 400))
    assert low < median < high
    assert abs(median - 1) < 0.02 and high - low < 0.05
    assert np.isnan(harness.bootstrap_median([])[0])


def steps(rng: np.random.Generator, count: int, cost: float, every_fiftieth: float = 0.0) -> np.ndarray:
    """Step rows on a machine that slows down threefold in the middle."""
    rows, now = [], 0.0
    for i in range(count):
        slow = 3.0 if 2.0 < now < 4.0 else 1.0
        took = (cost + (every_fiftieth if i % 50 == 0 else 0.0)) * slow * rng.lognormal(0, 0.05)
        rows.append((now, took, took))
        now += took
    return np.array(rows)


def test_ratio_of_two_runs_at_the_same_time() -> None:
    rng = np.random.default_rng(1)
    rounds = [analyse.compare(steps(rng, 600, 0.010), steps(rng, 600, 0.0103, every_fiftieth=0.010)) for _ in range(6)]
    median, low, high = analyse.estimate([r.medians for r in rounds])
    assert abs(median - 1.03) < 0.01 and low < median < high and high - low < 0.02
    mean, _, _ = analyse.estimate([r.cpu_means for r in rounds])
    assert abs(mean - 1.05) < 0.015, "the dear step among fifty is in the mean"
    alone = analyse.estimate([r.medians for r in rounds[:1]])
    assert alone[1] < alone[0] < alone[2]


def test_runs_that_never_met_are_refused() -> None:
    rng = np.random.default_rng(2)
    early = steps(rng, 50, 0.01)
    with pytest.raises(ValueError, match="no time in common"):
        analyse.compare(early, early + np.array([100.0, 0, 0]))
