"""Every page ``tests/rules/<cause>.md`` is a test of that rule; every rule has such a page.

A page is prose and cases. A case is a heading ``## Fires: …`` or ``## Quiet: …``, a fenced ``python`` block that sets ``window``
(and, if it likes, ``options``), and a fenced ``json`` block with the expected findings. ``UPDATE=1 pytest`` rewrites the json.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import osler.rules
from osler.core.finding import Finding
from osler.core.rule import Rule

HERE = Path(__file__).parent
RULES = Path(osler.rules.__file__).parent
SECTIONS = ("What it is", "How it is seen", "Why it matters", "What to do", "When this is wrong", "Source")
CASE = re.compile(r"^## (?P<kind>Fires|Quiet): (?P<title>.+?)\n(?P<body>.*?)(?=^## |\Z)", re.M | re.S)
PYTHON = re.compile(r"```python\n(?P<code>.*?)```", re.S)
JSON = re.compile(r"```json\n(?P<text>.*?)```", re.S)

spec = importlib.util.spec_from_file_location("osler_rule_pages_build", HERE / "build.py")
assert spec is not None and spec.loader is not None
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


def all_rules() -> dict[str, tuple[Path, Rule]]:
    """Cause to (file, rule), from the files of the catalogue's folders."""
    rules = {}
    for path in sorted(RULES.glob("*/*.py")):
        if path.stem != "__init__":
            found = getattr(importlib.import_module(f"osler.rules.{path.parent.name}.{path.stem}"), "check", None)
            if found is not None:
                rules[found.cause] = (path, found)
    return rules


RULE = all_rules()


@dataclass(frozen=True)
class Case:
    page: Path
    kind: str
    title: str
    code: str
    expected: list | None

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.title}"


def cases(page: Path) -> list[Case]:
    found = []
    for m in CASE.finditer(page.read_text()):
        code, text = PYTHON.search(m["body"]), JSON.search(m["body"])
        assert code, f"{page.name}: case {m['title']!r} has no python block"
        found.append(Case(page, m["kind"], m["title"].strip(), code["code"], json.loads(text["text"]) if text and text["text"].strip() else None))
    return found


PAGES = sorted(HERE.glob("*.md"))
CASES = [c for page in PAGES for c in cases(page)]


def wire(rows: list[dict]) -> str:
    return "[\n" + ",\n".join("  " + json.dumps(r) for r in rows) + "\n]\n" if rows else "[]\n"


def update(case: Case, rows: list[dict]) -> None:
    text = case.page.read_text()
    m = next(m for m in CASE.finditer(text) if m["title"].strip() == case.title)
    body, block = m["body"], f"```json\n{wire(rows)}```"
    body = JSON.sub(lambda _: block, body, count=1) if JSON.search(body) else body.rstrip() + f"\n\n{block}\n\n"
    case.page.write_text(text[: m.start("body")] + body + text[m.end("body"):])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_page(case: Case) -> None:
    scope: dict = {"build": build}
    exec(compile(case.code, f"{case.page.name} ({case.title})", "exec"), scope)
    _, rule = RULE[case.page.stem]
    findings = rule(scope["window"], **scope.get("options", {}))
    rows = [build.reduced(f) for f in findings]
    claims = [f for f in findings if isinstance(f, Finding)]
    for f in claims:
        assert f.cause == rule.cause
        assert f.title and f.fix and f.evidence, "a finding needs a title, a fix and evidence"
        json.dumps(f.to_json(), allow_nan=False)
    if case.kind == "Fires":
        assert claims, "a case that fires must yield a finding"
    else:
        assert not [f for f in claims if f.severity != "note"], "a quiet case may yield notes only"
    if os.environ.get("UPDATE"):
        update(case, rows)
    else:
        assert rows == case.expected


@pytest.mark.parametrize("cause", sorted(RULE))
def test_rule_is_complete(cause: str) -> None:
    path, rule = RULE[cause]
    assert path.stem == cause.replace("-", "_") and path.parent.name == rule.group
    missing = [s for s in SECTIONS if s not in rule.text]
    assert not missing, f"{cause}: docstring lacks {missing}"
    for p in list(inspect.signature(rule.check).parameters.values())[1:]:
        assert p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is not inspect.Parameter.empty, f"{cause}: option {p.name}"
    assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.M)
    page = HERE / f"{cause}.md"
    assert page.exists(), f"{cause}: no page tests/rules/{cause}.md"
    kinds = {c.kind for c in cases(page)}
    assert kinds == {"Fires", "Quiet"}, f"{cause}: a page needs a firing and a quiet case, it has {sorted(kinds)}"


def test_rules_survive_an_empty_window() -> None:
    for cause, (_, rule) in RULE.items():
        for window in (build.window(), build.window(ended=False)):
            loud = [f for f in rule(window) if isinstance(f, Finding)]
            assert not loud, cause


def test_every_page_has_a_rule() -> None:
    assert not [p.name for p in PAGES if p.stem not in RULE]
    titles = [str(c) for c in CASES]
    assert len(titles) == len(set(titles)), "two cases of one page share a title"
