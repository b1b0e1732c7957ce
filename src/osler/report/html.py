"""One self-contained HTML file: nothing in it is loaded from anywhere, and it reads without JavaScript too."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from osler.core.finding import LOUD
from osler.diagnose import catalogue
from osler.report import charts, words
from osler.report.json import wire
from osler.report.markdown import prose
from osler.report.markdown import render as markdown

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STRIPS = 8


def render(model: dict[str, Any]) -> str:
    run = model["run"]
    title = f"{run['script'] or run['command'] or 'run'}: {model['verdict']['text']}"
    data = json.dumps({**wire(model), "series": model["series"]}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="osler {escape(model["osler"])}">
<title>{escape(title)}</title>
<style>{asset("report.css")}</style>
</head>
<body>
<a class="skip" href="#findings">To the findings</a>
{top(model)}
<main class="page" id="findings">
{verdict(model)}
{timeline(model)}
{unchecked(model)}
{about(model)}
</main>
<script type="application/json" id="model">{data}</script>
<script>{asset("report.js")}</script>
</body>
</html>
"""


def asset(name: str) -> str:
    return (resources.files("osler.report") / "static" / name).read_text(encoding="utf-8")


def tag(name: str, kind: str, inner: str) -> str:
    """An element, or nothing where there is nothing to put in it."""
    return f'<{name} class="{kind}">{inner}</{name}>' if inner else ""


def top(model: dict[str, Any]) -> str:
    run = model["run"]
    facts = [words.count(run["steps"], "step"), words.seconds(run["seconds"]) if run["seconds"] else "", moment(run["started"]),
             words.ending(run["end"])]
    return (f'<header class="top"><span class="brand">osler</span><span class="script">{escape(run["script"] or run["command"])}</span>'
            + "".join(f"<span>{escape(f)}</span>" for f in facts if f) + "</header>")


def moment(started: Any) -> str:
    """An ISO time to the minute; a number of seconds stays out."""
    return started[:16].replace("T", " ") if isinstance(started, str) else ""


def verdict(model: dict[str, Any]) -> str:
    own = [f for f in model["findings"] if f["explained_by"] is None]
    state, text = model["verdict"]["state"], model["verdict"]["text"]
    if not own:
        counts = model["counts"]
        missing = f" {words.count(counts['not_checked'], 'point')} could not be checked, listed below." if counts["not_checked"] else ""
        return (f'<h1 class="big {state}">{escape(text[0].upper() + text[1:])}</h1>'
                f'<p class="quietly">{words.count(counts["checked"], "cause")} checked.{missing}</p>')
    links = "".join(f'<li class="{f["severity"]}"><a href="#f{i}"><span class="sev"></span>{escape(f["cause"])}</a></li>'
                    for i, f in enumerate(own, 1))
    index = f'<nav aria-label="Findings"><ul class="index">{links}</ul></nav>' if len(own) > 1 else ""
    articles = "".join(finding(f, i, model) for i, f in enumerate(own, 1))
    return f'<h1 class="{state}">{escape(text[0].upper() + text[1:])}</h1>{index}{articles}'


def finding(f: dict[str, Any], number: int, model: dict[str, Any]) -> str:
    loud = f["severity"] in LOUD
    kind = " first" if number == 1 and loud else "" if loud else " quiet"
    place = " · ".join([f"<b>{escape(f['place'])}</b>"] * bool(f["place"]) + [escape(n) for n in words.named(f["where"])])
    meta = [f'<li class="sev">{f["severity"]}</li>', f"<li>{f['certainty']}</li>", f"<li>{escape(words.span(f['when']))}</li>" if words.span(f["when"]) else "",
            f'<li class="mono">{escape(f["cause"])}</li>']
    body = [b for b in (code(f["code"]), proof(f, model)) if b]
    return (f'<article class="finding {f["severity"]}{kind}" id="f{number}" tabindex="-1" aria-labelledby="h{number}">'
            f'{tag("p", "place", place)}'
            f'<h2 id="h{number}">{prose(words.heading(f["fix"] or f["title"]))}</h2>'
            f'{tag("p", "claim", prose(words.sentence(f["title"])) if f["fix"] else "")}'
            f'{tag("ul", "meta", "".join(meta))}{tag("div", "split", "".join(body))}{effects(f, model)}{page(f["cause"])}</article>')


def code(excerpt: dict[str, Any] | None) -> str:
    if excerpt is None:
        return ""
    rows = "".join(f'<span class="row{" guilty" if r["guilty"] else ""}"><span class="n">{r["n"]}</span>{escape(r["text"], quote=False)}\n</span>'
                   for r in excerpt["lines"])
    return (f'<figure class="code"><figcaption>{escape(excerpt["file"])}</figcaption>'
            f'<pre tabindex="0" aria-label="{escape(excerpt["file"])}, line {excerpt["line"]} marked">{rows}</pre></figure>')


def proof(f: dict[str, Any], model: dict[str, Any]) -> str:
    """The chart and the figures."""
    rows = []
    for e in f["evidence"]:
        if e["text"]:
            seen = f' <span class="n">({words.count(e["samples"], "sample")})</span>' if e["samples"] and str(e["samples"]) not in e["text"] else ""
            rows.append(f"<li>{prose(e['text'])}{seen}</li>")
    rows += [f'<li>also <span class="mono">{escape(a)}</span></li>' for a in f["where"]["also"]]
    told = words.confirmation(f["confirmed"])
    if told:
        rows.append(f'<li class="confirmed">{escape(told)}</li>')
    listed = f'<ul class="evidence">{"".join(rows)}</ul>' if rows else ""
    chart = charts.of(f, model["series"])
    return f"<div>{chart}{listed}</div>" if chart or listed else ""


def effects(f: dict[str, Any], model: dict[str, Any]) -> str:
    rows = [g for g in model["findings"] if g["explained_by"] == f["cause"]]
    if not rows or next(g for g in model["findings"] if g["cause"] == f["cause"]) is not f:
        return ""
    reasons: dict[str, list[str]] = {}
    for g in rows:
        reasons.setdefault(g["why_folded"] or "", []).append(f'<li><span class="mono">{escape(g["cause"])}</span>: {prose(g["title"])}</li>')
    listed = "".join(f'{tag("p", "why", escape(why[:1].upper() + why[1:]))}<ul>{"".join(items)}</ul>' for why, items in reasons.items())
    return f'<div class="effects"><h3>Follows from it</h3>{listed}</div>'


def page(cause: str) -> str:
    if cause not in catalogue.known():
        return ""
    text = catalogue.explain(cause).split("\n", 1)[1]
    return f'<details><summary>About {escape(cause)}</summary><div class="doc">{markdown(text)}</div></details>'


def timeline(model: dict[str, Any]) -> str:
    """Losses over the whole run with the findings' spans below, then learning rate, gradient norm and step time."""
    series = model["series"]
    names = [n for n in ("train_loss", "validation_loss") if n in series and series[n]["count"] > 1]
    small = [n for n in ("lr", "grad_norm", "validation_accuracy", "train_accuracy", "step_time") if n in series and series[n]["count"] > 1]
    if not names and not small:
        return ""
    head = charts.curve(series, names, title="Loss", height="15rem") + strips(model, names) if names else ""
    rest = "".join(charts.curve(series, [n], title=series[n]["label"]) for n in small[:4])
    return f'<section aria-labelledby="run"><h2 id="run">The run</h2>{head}<div class="small">{rest}</div></section>'


def strips(model: dict[str, Any], names: list[str]) -> str:
    """For each finding that has one, the steps it spans."""
    first, last = charts.reach([model["series"][n] for n in names])
    rows = []
    own = [f for f in model["findings"] if f["explained_by"] is None]
    for i, f in enumerate(own[:STRIPS], 1):
        start, end = f["when"]["first_step"], f["when"]["last_step"]
        if start is None or last <= first:
            continue
        left, right = (100 * (min(max(s, first), last) - first) / (last - first) for s in (start, end if end is not None else last))
        side = f"left:{left:.1f}%" if left < 60 else f"right:{100 - right:.1f}%"
        rows.append(f'<a href="#f{i}"><i class="sev {f["severity"]}" style="left:{left:.1f}%;width:{right - left:.1f}%"></i>'
                    f'<span style="{side}">{escape(f["cause"])}, {words.span(f["when"])}</span></a>')
    return f'<div class="strips">{"".join(rows)}</div>' if rows else ""


def unchecked(model: dict[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(', '.join(rules))}</td><td>{escape(why)}</td></tr>" if len(rules) < 3 else
                   f"<tr><td>{len(rules)} causes</td><td>{escape(why)}<br><code>{escape(', '.join(rules))}</code></td></tr>"
                   for why, rules in words.unchecked(model["not_checked"]))
    return f'<section aria-labelledby="unchecked"><h2 id="unchecked">Not checked</h2><table class="plain">{rows}</table></section>' if rows else ""


def about(model: dict[str, Any]) -> str:
    run, counts = model["run"], model["counts"]
    versions = ", ".join(f"{name} {run[key]}" for name, key in (("torch", "torch"), ("Python", "python")) if run[key])
    hidden = [f"{s['cause']}{' at ' + s['where']['file'] + ':' + str(s['where']['line']) if s['where']['file'] else ''}" for s in model["suppressed"]]
    rows = [("command", f"<code>{escape(run['command'])}</code>" if run["command"] else ""), ("folder", f"<code>{escape(run['directory'])}</code>"),
            ("versions", escape(versions)), ("checked", words.count(counts["checked"], "cause")),
            ("suppressed", escape(", ".join(hidden))), ("cost of osler", escape(words.cost(model["overhead"])))]
    cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows if value)
    return (f'<section aria-labelledby="about"><h2 id="about">About this run</h2><table class="plain">{cells}</table></section>'
            f'<footer class="foot"><span>osler {escape(model["osler"])}</span>'
            '<span class="keys"><kbd>j</kbd> <kbd>k</kbd> next and previous finding, arrow keys read a chart</span></footer>')
