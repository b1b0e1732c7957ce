"""The view model: what it holds, and that any JSON reader can take it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import report_sample as sample

from osler.core.finding import Evidence, Finding, Where
from osler.core.window import End, Window
from osler.diagnose.engine import Verdict
from osler.report import series
from osler.report.model import build


def strictly(model: dict) -> dict:
    return json.loads(json.dumps(model, allow_nan=False))


@pytest.mark.parametrize("which", [sample.faulty, sample.healthy, sample.broken])
def test_it_is_plain_json(which) -> None:
    model = build(*which())
    assert strictly(model) == model


def test_paths_are_relative_to_the_working_directory() -> None:
    model = build(*sample.faulty())
    assert sample.CWD not in json.dumps({k: v for k, v in model.items() if k != "run"})
    assert model["findings"][0]["place"] == "train.py:18"
    assert model["findings"][0]["where"]["also"] == ["train.py:19"]
    assert model["run"]["script"] == "train.py"
    assert model["run"]["command"] == "python train.py"


def test_a_file_elsewhere_keeps_its_whole_path() -> None:
    found = Finding("wrong-dim", "certain", "harmful", "t", "f", Where("/opt/lib/model.py", 3))
    assert build(Window(sample.RUN, end=End(0)), Verdict((found,)))["findings"][0]["where"]["file"] == "/opt/lib/model.py"


def test_the_code_around_a_finding_has_the_line_marked() -> None:
    code = build(*sample.faulty())["findings"][0]["code"]
    assert [line["n"] for line in code["lines"]] == [15, 16, 17, 18, 19, 20, 21]
    assert [line["text"] for line in code["lines"] if line["guilty"]] == ["    loss.backward()"]


@pytest.mark.parametrize("line", [0, 1, 24, 25, 999])
def test_excerpts_stop_at_the_ends_of_the_file(line: int) -> None:
    window, _ = sample.faulty()
    found = Finding("wrong-dim", "certain", "harmful", "t", "f", Where(f"{sample.CWD}/train.py", line))
    code = build(window, Verdict((found,)))["findings"][0]["code"]
    assert (code is None) == (line not in range(1, 25))


def test_charts_show_the_evidence() -> None:
    by_cause = {f["cause"]: f["chart"] for f in build(*sample.faulty())["findings"]}
    assert by_cause["grad-not-cleared"]["series"] == ["grad_norm"]
    assert by_cause["grad-not-cleared"]["threshold"] == 21.0
    assert by_cause["exploding-gradients"]["kind"] == "bars"
    assert [b["name"] for b in by_cause["exploding-gradients"]["bars"] if b["mark"]] == ["2.weight"]
    assert by_cause["loss-diverged"]["series"] == ["train_loss", "validation_loss"]
    assert by_cause["nondeterminism"] is None


def test_many_layers_are_thinned_but_the_accused_stays() -> None:
    from osler.core.facts import Fact
    from osler.core.signals import STREAMS

    rows = np.zeros(200, STREAMS["layers"].dtype)
    rows["param"], rows["grad_norm"] = np.arange(200), np.geomspace(1e-6, 1, 200)
    facts = [Fact("params", 0, 0.0, None, {"params": [{"uid": i, "name": f"p{i}"} for i in range(200)]})]
    found = Finding("vanishing-gradients", "measured", "harmful", "t", "f", Where(parameter="p77"),
                    evidence=(Evidence("small", "layers/grad_norm"),))
    chart = build(Window({}, {"layers": rows}, facts), Verdict((found,)))["findings"][0]["chart"]
    assert len(chart["bars"]) <= 17
    assert [b["name"] for b in chart["bars"] if b["mark"]] == ["p77"]
    assert chart["log"]


def test_no_extreme_is_lost_by_downsampling() -> None:
    x = np.arange(1_000_000)
    y = np.ones(1_000_000)
    y[345_678], y[700_001] = 1e4, 1e-4
    packed = series.pack(series.SPECS["train_loss"], x, y)
    assert len(packed["x"]) <= series.BUCKETS
    assert max(packed["max"]) == 1e4
    assert min(packed["min"]) == 1e-4
    assert packed["end"][-1] == 999_999


def test_a_loss_that_turns_nan_is_counted_and_a_gap_is_not() -> None:
    nan = math.nan
    packed = series.pack(series.SPECS["train_loss"], np.arange(6), np.array([nan, 1.0, nan, 2.0, nan, math.inf]), lost_from=3)
    assert packed["count"] == 2
    assert packed["nonfinite"] == {"count": 2, "for_good": True, "first_step": 4, "last_step": 5}


def test_calls_at_one_step_are_averaged_by_their_rows() -> None:
    from osler.core.signals import STREAMS

    calls = np.zeros(3, STREAMS["calls"].dtype)
    calls["step"], calls["phase"], calls["batch"], calls["value"] = [5, 5, 6], 1, [30, 10, 1], [1.0, 3.0, 7.0]
    packed = series.all_series(Window({}, {"calls": calls}))["validation_loss"]
    assert packed["mean"] == [1.5, 7.0]


def test_the_verdict_in_words() -> None:
    assert build(*sample.faulty())["verdict"] == {"state": "fault", "text": "2 faults found in 450 steps"}
    assert build(*sample.healthy())["verdict"] == {"state": "healthy", "text": "no fault found in 450 steps"}
    window, _ = sample.healthy()
    running = Window(window.run, window.streams)
    assert build(running, Verdict(checked=("wrong-dim",)))["verdict"]["text"] == "no fault found in 450 steps so far"
    remark = Finding("label-noise", "suspected", "note", "t", "f")
    assert build(window, Verdict((remark,), checked=("wrong-dim",)))["verdict"] == {"state": "remarks", "text": "no fault found in 450 steps, 1 remark"}


def test_folded_findings_say_why() -> None:
    folded = [f for f in build(*sample.faulty())["findings"] if f["explained_by"]]
    assert {f["cause"] for f in folded} == {"exploding-gradients", "loss-diverged"}
    assert all(f["why_folded"] for f in folded)


def test_findings_of_others_join_the_ranking() -> None:
    window, verdict = sample.healthy()
    extra = Finding("lr-too-high", "certain", "harmful", "sharpness 81 times the stable bound", "Divide lr by 100")
    assert [f["cause"] for f in build(window, verdict, [extra])["findings"]] == ["lr-too-high"]


def test_an_empty_window_is_no_error() -> None:
    model = build(Window(), Verdict())
    assert model["findings"] == []
    assert model["series"] == {}


def test_an_excerpt_stays_within_its_function() -> None:
    text = "def f():\n    return 1\n\n\ndef g(x):\n    y = x\n    return y\n\n\nh = 3\n"
    found = Finding("wrong-dim", "certain", "harmful", "t", "f", Where("a.py", 5))
    code = build(Window(sources={"a.py": text}), Verdict((found,)))["findings"][0]["code"]
    assert [line["n"] for line in code["lines"]] == [5, 6, 7]
