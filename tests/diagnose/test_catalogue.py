"""The catalogue is complete, every entry can be explained, and its pages are fresh."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import osler.rules
from osler.core.errors import UsageError
from osler.core.rule import STATUSES, Rule
from osler.diagnose import catalogue
from osler.diagnose.causes import EDGES
from osler.diagnose.meanings import MEANINGS

ROOT = Path(__file__).parents[2]
RULES_FOLDER = Path(osler.rules.__file__).parent


def rule_files() -> list[Path]:
    return [p for p in sorted(RULES_FOLDER.glob("*/*.py")) if re.search(r"^@rule\(", p.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("path", rule_files(), ids=lambda p: p.stem)
def test_every_rule_file_is_listed(path: Path) -> None:
    module = importlib.import_module(f"osler.rules.{path.parent.name}.{path.stem}")
    assert isinstance(module.check, Rule)
    assert module.check in catalogue.RULES, f"list {path.parent.name}/{path.name} in diagnose/catalogue.py"
    assert module.check.cause == path.stem.replace("_", "-")
    assert module.check.group == path.parent.name


def test_every_cause_is_listed_once() -> None:
    causes = [r.cause for r in catalogue.RULES]
    assert len(causes) == len(set(causes))


@pytest.mark.parametrize("rule", catalogue.RULES, ids=lambda r: r.cause)
def test_every_rule_documents_itself(rule: Rule) -> None:
    assert rule.status in STATUSES
    for section in catalogue.SECTIONS:
        assert re.search(rf"^\*\*{section}\.\*\*", catalogue.text(rule), re.MULTILINE), f"{rule.cause}: no section '{section}'"


def test_meanings_are_one_line_without_a_full_stop() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cause) for cause in MEANINGS)
    assert not [text for text in MEANINGS.values() if not text or text.endswith(".") or "\n" in text]


@pytest.mark.parametrize("cause", sorted(catalogue.known()))
def test_every_cause_can_be_explained(cause: str) -> None:
    text = catalogue.explain(cause)
    assert text.startswith(f"# {cause}\n")
    assert catalogue.meaning(cause)


def test_a_cause_without_a_rule_says_so() -> None:
    without = next(c for c in MEANINGS if catalogue.rule_for(c) is None)
    assert "no rule yet" in catalogue.explain(without)


def test_an_unknown_cause_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'grad-not-cleared'"):
        catalogue.explain("grad-not-clear")


def test_the_cause_graph_speaks_of_known_causes() -> None:
    known = catalogue.known()
    assert not {c for e in EDGES for c in (e.cause, e.explains)} - known
    assert all(e.cause != e.explains and e.reason for e in EDGES)


def test_pages_are_fresh() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "catalogue"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
