"""The HTML file: self-contained, escaped, whole. ``browser`` tests open it in Chromium where that is installed."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_sample as sample

from osler.core.finding import Evidence, Finding, Where
from osler.core.window import End, Window
from osler.diagnose.engine import Verdict
from osler.report import html
from osler.report.markdown import prose
from osler.report.markdown import render as markdown
from osler.report.model import build

VOID = {"meta", "line", "rect", "path", "br", "link", "img"}
CHROMIUM = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None) or shutil.which("google-chrome")


class Page(HTMLParser):
    """Collects attributes that load something, ids, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [str(values[k]) for k in ("src", "srcset", "data", "poster", "background") if k in values]
        self.loads += [str(values["href"])] if tag in ("link", "image", "use") and "href" in values else []
        if tag == "a":
            self.links.append(str(values.get("href")))
        if "id" in values:
            self.ids.append(str(values["id"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def page(which: str = "faulty") -> str:
    return html.render(build(*getattr(sample, which)()))


@pytest.mark.parametrize("which", ["faulty", "healthy", "broken"])
def test_nothing_is_loaded_from_anywhere(which: str) -> None:
    text = page(which)
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.loads == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "default-src 'none'" in text
    assert all(link.startswith(("#", "https://", "http://")) for link in parsed.links)
    code = re.sub(r"<a [^>]*>.*?</a>|<details>.*?</details>", "", text, flags=re.DOTALL)
    assert not re.findall(r"https?://(?!www\.w3\.org)", code.split('<script type="application/json"')[0])


@pytest.mark.parametrize("which", ["faulty", "healthy", "broken"])
def test_anchors_lead_somewhere_and_ids_are_unique(which: str) -> None:
    parsed = Page(page(which))
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)


def test_code_and_data_are_small() -> None:
    text = page()
    data = re.search(r'<script type="application/json" id="model">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert len(html.asset("report.css")) + len(html.asset("report.js")) < 40_000
    assert len(text) < 300_000
    assert json.loads(data.group(1))["schema"] == 1


def test_every_finding_is_there_with_its_fix_first() -> None:
    text = page()
    assert text.index('Call <code>optimizer.zero_grad()</code> before <code>loss.backward()</code>') < text.index("449 of 450 steps added")
    for cause in ("grad-not-cleared", "eval-mode-missing", "no-workers", "nondeterminism", "exploding-gradients", "loss-diverged"):
        assert cause in text
    assert 'class="row guilty"><span class="n">18</span>' in text
    assert text.count("Follows from it") == 1
    assert "1.3 % of the step time (budget 2 %)" in text
    assert "no gradient scaler was used" in text


def test_a_healthy_run_gets_a_quiet_page() -> None:
    text = page("healthy")
    assert "No fault found in 450 steps" in text
    assert "<article" not in text


def test_what_the_user_wrote_is_never_markup() -> None:
    evil = "<img src=x onerror=alert(1)></script>"
    found = Finding("wrong-dim", "certain", "harmful", evil, evil, Where(evil, 1, module=evil, also=(evil,)), 1, 2, (Evidence(evil),))
    window = Window({"command": [evil], "cwd": evil, "started": evil}, sources={evil: evil}, end=End(0))
    text = html.render(build(window, Verdict((found,), suppressed=(found,))))
    parsed = Page(text)
    assert parsed.loads == []
    assert "<img" not in text
    assert text.count("</script>") == 2


def test_markdown() -> None:
    assert markdown("# T\n\nA `b<c` **d** [e](https://f.org/g).") == (
        '<h4>T</h4>\n<p>A <code>b&lt;c</code> <strong>d</strong> <a href="https://f.org/g" rel="noreferrer">e</a>.</p>')
    assert markdown("- a\n  b\n- c") == "<ul><li>a b</li><li>c</li></ul>"
    assert markdown("| a | b |\n|---|---|\n| `c` | d |") == "<table><tr><th>a</th><th>b</th></tr><tr><td><code>c</code></td><td>d</td></tr></table>"
    assert markdown("```python\nx = 1\n\ny\n```") == "<pre><code>x = 1\n\ny</code></pre>"
    assert prose("Call model.eval() <now>, or `x`") == "Call <code>model.eval()</code> &lt;now&gt;, or <code>x</code>"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    api = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "report.html"
    file.write_text(page(), encoding="utf-8")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 844})
        requests, troubles = [], []
        tab.on("request", lambda r: requests.append(r.url))
        tab.on("console", lambda m: troubles.append(m.text))
        tab.on("pageerror", lambda e: troubles.append(str(e)))
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        for number in ("f1", "f2", "f3", "f4"):
            tab.keyboard.press("j")
            assert tab.evaluate("document.activeElement.id") == number
        tab.keyboard.press("k")
        assert tab.evaluate("document.activeElement.id") == "f3"
        plot = tab.locator("section .plot").first
        plot.focus()
        tab.keyboard.press("End")
        assert "step 450" in tab.locator("section .chart output").first.inner_text()
        assert tab.evaluate("[...document.querySelectorAll('svg path.curve')].every(p => p.getBBox().width > 100 && p.getTotalLength() > 0)")
        browser.close()
    assert requests == [file.as_uri()]
    assert troubles == []


def test_a_hole_in_a_curve_is_bridged_not_drawn() -> None:
    import numpy as np

    from osler.report import charts, series

    x = np.r_[0:20, 200:220]
    packed = series.pack(series.SPECS["train_loss"], x, np.linspace(2, 1, 40))
    assert charts.gaps(packed).count(True) == 1
    drawn = charts.curve({"train_loss": packed}, ["train_loss"], title="Loss")
    assert 'class="bridge"' in drawn and "not measured" in drawn


def test_a_loss_that_reaches_zero_keeps_its_logarithmic_axis() -> None:
    import numpy as np

    from osler.report import charts, series

    y = np.geomspace(10, 1e-3, 50)
    y[7] = 0
    assert charts.scale([series.pack(series.SPECS["train_loss"], np.arange(50), y)], None).log
    assert not charts.scale([series.pack(series.SPECS["train_loss"], np.arange(50), -y)], None).log
