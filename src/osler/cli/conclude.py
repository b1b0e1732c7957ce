"""The last word about a run: findings.json, report.html, the files asked for, and the verdict on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from osler.cli import say
from osler.cli.follow import Follower, reaches
from osler.cli.options import Options
from osler.core.finding import NotChecked
from osler.core.window import Window

Model = dict[str, Any]


def conclude(follower: Follower, options: Options, subject: str) -> bool:
    """Diagnose, write, speak. Returns whether ``--fail-on`` asks for exit code 1. Exceptions become a line and a log entry."""
    try:
        follower.last_word()
    except Exception:
        follower.trouble("the final diagnosis failed")
    try:
        model = build(follower, subject)
    except Exception:
        follower.trouble("the report could not be made")
        return False
    directory = follower.directory
    written: dict[str, Path] = {}

    def attempt(what: str, file: Path | None, content: Callable[[], str]) -> None:
        if file is None:
            return
        try:
            file.write_text(content(), encoding="utf-8")
            written[what] = file
        except Exception:
            follower.trouble(f"{file} could not be written")

    attempt("findings", directory / "findings.json", lambda: render(model, "json"))
    attempt("json", options.json, lambda: render(model, "json"))
    attempt("output", options.output, lambda: render(model, options.format or "text"))
    if follower.windows and options.html:
        attempt("html", directory / "report.html", lambda: render(model, "html"))
    if not options.quiet:
        try:
            speak(follower, model, subject, options, written.get("html"))
        except Exception:
            follower.trouble("the verdict could not be shown")
    return any(reaches(f["severity"], options.fail_on) for f in model["findings"])


def build(follower: Follower, subject: str) -> Model:
    """The view model of the first rank with everything found on any rank; of nothing, where nothing was seen."""
    from osler.diagnose.engine import Verdict
    from osler.report import model
    from osler.store.files import read_json

    window = follower.primary
    if window is None:
        nothing = NotChecked("all", nothing_seen(follower.directory, subject))
        return model.build(Window(run=read_json(follower.directory / "run.json") or {}, end=follower.end), Verdict(not_checked=(nothing,)))
    verdict = follower.verdict or Verdict(not_checked=(NotChecked("all", "the diagnosis failed, see osler.log"),))
    ranks = len({rank for rank, _ in follower.windows})
    run = {**window.run, "ranks": ranks} if ranks > 1 else window.run
    return model.build(replace(window, run=run), verdict)


def nothing_seen(directory: Path, subject: str) -> str:
    """Why there is nothing to watch, from the marks that the import hook left."""
    if (directory / ".torch").exists():
        return f"torch was imported by {subject}, but no training was seen: no optimizer, no backward pass"
    if (directory / ".python").exists():
        return f"torch was never imported by {subject}: nothing to watch"
    return f"{subject} started no Python that osler can watch (-I, -E and -S shut it out, other machines are out of reach): nothing to watch"


def attach_troubles(directory: Path) -> list[str]:
    try:
        return (directory / "attach.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def speak(follower: Follower, model: Model, subject: str, options: Options, html: Path | None) -> None:
    troubles = attach_troubles(follower.directory)
    if troubles:
        more = f" (and {len(troubles) - 1} more in {follower.directory / 'attach.log'})" if len(troubles) > 1 else ""
        say.say(f"osler: could not watch {troubles[0]}{more}")
    if not follower.windows:
        say.say("osler: " + nothing_seen(follower.directory, subject))
        return
    from osler.report import terminal

    color = "always" if say.colored(options.color) else "never"
    raw = io.BytesIO()
    page = io.TextIOWrapper(raw, encoding=sys.stderr.encoding or "utf-8", errors="replace", newline="")
    terminal.render(model, page, color=color, width=say.terminal_width() or 100, link=shown(html) if html else None)
    page.flush()
    say.put_bytes(say.fresh_line().encode() + raw.getvalue())


def shown(path: Path) -> str:
    """Relative to where the user stands, when it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def render(model: Model, form: str) -> str:
    """The findings in one of the forms of ``--format``, or as ``html``."""
    from osler.report import html, json, sarif

    if form == "text":
        return text(model)
    if form == "html":
        return html.render(model)
    return {"json": json.render, "jsonl": json.render_lines, "sarif": sarif.render}[form](model)


def text(model: Model, color: str = "never", width: int = 100) -> str:
    from osler.report import terminal

    page = io.StringIO()
    terminal.render(model, page, color=color, width=width)
    return page.getvalue()
