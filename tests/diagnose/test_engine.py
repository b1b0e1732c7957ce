"""Running, joining, suppressing, ranking; what the verdict says about itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from osler.core.facts import Fact
from osler.core.finding import Evidence, Finding, NotChecked, Where
from osler.core.rule import Rule, rule
from osler.core.signals import STREAMS
from osler.core.trace import Trace
from osler.core.window import End, Window
from osler.diagnose.config import Config
from osler.diagnose.engine import STARTUP_STEPS, diagnose, merge
from osler.diagnose.rank import rank

SOURCE = """\
loss.backward()  # osler: ignore[grad-not-cleared]
loss = criterion(
    model(x),
    y)  # osler: ignore
optimizer.step()
for x in loader:  # osler: ignore[no-shuffle-sorted, no-workers]
    train(x)
print("done")  # osler: ignore[grad-not-clear]
"""


def finding(cause: str, line: int | None = None, certainty: str = "certain", severity: str = "harmful", **more: object) -> Finding:
    where = Where("train.py", line) if line else Where()
    return Finding(cause, certainty, severity, f"title of {cause}", f"fix of {cause}", where, **more)  # type: ignore[arg-type]


def saying(*findings: Finding | NotChecked, cause: str | None = None, group: str = "wiring") -> Rule:
    first = findings[0]

    @rule(cause or (first.cause if isinstance(first, Finding) else first.rule), group)
    def check(window: Window, *, threshold: float = 1.0) -> Iterator[Finding | NotChecked]:
        yield from findings

    return check


def steps(n: int, own: float = 0.0002, step: float = 0.01) -> np.ndarray:
    rows = np.zeros(n, STREAMS["steps"].dtype)
    rows["step"], rows["step_time"], rows["own_time"] = np.arange(1, n + 1), step, own
    rows["t"] = np.cumsum(rows["step_time"])
    rows["own_time"][:STARTUP_STEPS] = 1.0
    return rows


def shown(window: Window, *rules: Rule, config: Config | None = None) -> list[str]:
    return [f.cause for f in diagnose(window, config, rules).findings]


def test_a_rule_that_fails_is_not_checked_and_hides_no_other() -> None:
    @rule("lr-too-high", "optimization")
    def check(window: Window) -> Iterator[Finding]:
        raise ZeroDivisionError("of nothing")
        yield

    verdict = diagnose(Window(), None, [check, saying(finding("grad-not-cleared"))])
    assert [f.cause for f in verdict.findings] == ["grad-not-cleared"]
    assert NotChecked("lr-too-high", "failed: ZeroDivisionError: of nothing") in verdict.not_checked
    assert verdict.checked == ("grad-not-cleared",)


def test_options_reach_the_rule() -> None:
    @rule("lr-too-high", "optimization")
    def check(window: Window, *, threshold: float = 1.0) -> Iterator[Finding]:
        yield finding("lr-too-high", evidence=(Evidence("", value=threshold),))

    verdict = diagnose(Window(), Config(options={"lr-too-high": {"threshold": 7.0}}), [check])
    assert verdict.findings[0].evidence[0].value == 7.0


def test_two_sightings_of_one_finding_are_joined() -> None:
    first = finding("wrong-dim", 3, "measured", "harmful", first_step=5, last_step=9, evidence=(Evidence("a"),))
    second = finding("wrong-dim", 3, "certain", "harmful", first_step=2, last_step=3, evidence=(Evidence("b"),))
    joined = diagnose(Window(), None, [saying(first, second)]).findings
    assert len(joined) == 1
    assert (joined[0].certainty, joined[0].first_step, joined[0].last_step) == ("certain", 2, 9)
    assert {e.text for e in joined[0].evidence} == {"a", "b"}


def test_a_sighting_without_a_place_joins_the_one_that_has_it_and_other_lines_stay() -> None:
    found = shown(Window(), saying(finding("wrong-dim", None, "suspected"), finding("wrong-dim", 3), finding("wrong-dim", 8)))
    assert found == ["wrong-dim", "wrong-dim"]


def test_ignore_hides_and_counts() -> None:
    verdict = diagnose(Window(), Config(ignore=frozenset({"grad-not-cleared"})), [saying(finding("grad-not-cleared")), saying(finding("wrong-dim"))])
    assert [f.cause for f in verdict.findings] == ["wrong-dim"]
    assert [f.cause for f in verdict.suppressed] == ["grad-not-cleared"]


def test_ignore_takes_whole_groups() -> None:
    verdict = diagnose(Window(), Config(ignore=frozenset({"wiring"})), [saying(finding("grad-not-cleared")), saying(finding("lr-too-high"))])
    assert [f.cause for f in verdict.findings] == ["lr-too-high"]


def test_select_leaves_out_the_others_and_says_so() -> None:
    config = Config(select=frozenset({"log-of-zero"}))
    both = saying(finding("log-of-zero"), finding("loss-nan"), cause="loss-nan", group="numerics")
    verdict = diagnose(Window(), config, [both, saying(finding("wrong-dim"))])
    assert [f.cause for f in verdict.findings] == ["log-of-zero"]
    assert any(n.rule == "select" and "2 rules" in n.why for n in verdict.not_checked)


def test_a_comment_on_the_line_hides_only_what_it_names() -> None:
    window = Window(sources={"train.py": SOURCE})
    assert shown(window, saying(finding("grad-not-cleared", 1))) == []
    assert shown(window, saying(finding("wrong-dim", 1))) == ["wrong-dim"]
    assert shown(window, saying(finding("grad-not-cleared", 5))) == ["grad-not-cleared"]


def test_a_comment_covers_the_whole_statement_but_not_the_body_of_a_loop() -> None:
    window = Window(sources={"train.py": SOURCE})
    assert shown(window, saying(finding("double-activation", 3))) == []
    assert shown(window, saying(finding("no-workers", 6))) == []
    assert shown(window, saying(finding("no-workers", 7))) == ["no-workers"]


def test_a_comment_that_names_no_cause_is_reported() -> None:
    verdict = diagnose(Window(sources={"train.py": SOURCE}), None, [])
    assert any("train.py:8" in n.why and "'grad-not-cleared'" in n.why for n in verdict.not_checked)


def test_statistics_of_a_suppressed_cause_go_with_it_but_facts_stay() -> None:
    config = Config(ignore=frozenset({"grad-not-cleared"}))
    found = [finding("grad-not-cleared"), finding("lr-too-high", certainty="measured"), finding("loss-nan", severity="fatal")]
    verdict = diagnose(Window(), config, [saying(*found)])
    assert [f.cause for f in verdict.findings] == ["loss-nan"]
    assert {f.cause for f in verdict.suppressed} == {"grad-not-cleared", "lr-too-high"}


def test_the_order_puts_what_can_be_changed_first() -> None:
    rows = [finding("no-workers", 9, "measured", "wasteful"), finding("loss-nan", None, "certain", "fatal"),
            finding("vanishing-gradients", None, "measured"), finding("lr-too-high", None, "suspected"),
            finding("eval-mode-missing", 4), finding("wrong-dim", 5), finding("out-of-memory", None, "certain", "fatal")]
    assert [f.cause for f in rank(rows)] == [
        "out-of-memory", "wrong-dim", "eval-mode-missing", "vanishing-gradients", "lr-too-high", "loss-nan", "no-workers"]
    assert rank(rows) == rank(rows[::-1])


def test_what_the_run_as_a_whole_hides_is_said() -> None:
    facts = [Fact("compile", 0, 0.0, None, {"what": "torch.compile"}), Fact("self", 0, 0.0, None, {"what": "disarmed", "text": "tap loss is off"})]
    traces = [Trace(0, "", 0, 1, True, (), ())]
    why = {n.rule: n.why for n in diagnose(Window({}, {"steps": steps(7)}, facts, traces), None, []).not_checked}
    assert "only 7 steps" in why["curves"]
    assert "torch.compile" in why["compiled regions"]
    assert "1 of 1" in why["program traces"]
    assert why["osler"] == "tap loss is off"


def test_overhead_leaves_out_the_start() -> None:
    verdict = diagnose(Window({"budget": 0.02}, {"steps": steps(50)}), None, [])
    assert abs(verdict.overhead["fraction"] - 0.02) < 1e-6
    assert verdict.overhead["budget"] == 0.02
    assert abs(verdict.overhead["startup_s"] - STARTUP_STEPS) < 1e-6


def test_overhead_of_nothing_is_unknown_not_zero() -> None:
    assert diagnose(Window(end=End(0)), None, []).overhead["fraction"] is None


def test_ranks_are_merged_into_one_verdict() -> None:
    def on(number: int) -> Finding:
        return finding("grad-not-cleared", 3).replace(where=Where("train.py", 3, rank=number))

    both = merge([diagnose(Window(rank=i), None, [saying(on(i), finding("loss-plateau", None, "measured"))]) for i in (1, 0)])
    assert [(f.cause, f.where.rank) for f in both.findings] == [("grad-not-cleared", 0), ("loss-plateau", None)]
    assert both.findings[1].explained_by == "grad-not-cleared"
