"""The arithmetic of bench/healthy, and a run of it with a stand-in for osler."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench" / "healthy"
spec = importlib.util.spec_from_file_location("osler_bench_healthy", BENCH / "run.py")
assert spec is not None and spec.loader is not None
healthy = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = healthy
spec.loader.exec_module(healthy)

STAND_IN = """
import json, pathlib, sys
found = [] if "torch.manual_seed(0)" in open("train.py").read() else [
    {"cause": "a", "severity": "harmful", "title": "t"}, {"cause": "b", "severity": "note"}, {"cause": "c", "severity": "fatal", "explained_by": "a"}]
pathlib.Path(sys.argv[5]).write_text(json.dumps({"findings": found, "overhead": {"steps": 3, "fraction": 0.01}}))
"""


def test_broken_runs_count_neither_way() -> None:
    runs = [healthy.Run("a", alarms=("x", "x")), healthy.Run("b", notes=("y",)), healthy.Run("c"), healthy.Run("d", alarms=("x",), broken="no findings")]
    said = healthy.summary(runs)
    assert (said["runs"], said["false_alarm_runs"], said["silent_runs"], said["broken"]) == (3, 1, 1, 1)
    assert said["false_alarm_share"] == 1 / 3 and said["alarms_by_rule"] == {"x": 1} and said["notes_by_rule"] == {"y": 1}


def test_enough_cases_and_a_quick_part_of_them() -> None:
    names = {p.stem for p in (BENCH / "cases").glob("*.py")}
    assert len(names) >= 44 and names >= healthy.QUICK and names >= set(healthy.NEEDS)


def test_command_to_json(tmp_path: Path) -> None:
    (tmp_path / "osler.py").write_text(STAND_IN)
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "run.py"), "--only", "an_", "--jobs", "1", "--json", str(out), "--osler", shlex.join([sys.executable, str(tmp_path / "osler.py")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    rows = {r["case"]: r for r in document["rows"]}
    assert document["summary"]["runs"] == len(rows) and "wgan_gp" in rows
    assert rows["gan_ring"]["alarms"] == ["a"] and rows["gan_ring"]["notes"] == ["b"]
