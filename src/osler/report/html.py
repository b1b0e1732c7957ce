"""One self-contained HTML file. Nothing in it is loaded from anywhere."""

from __future__ import annotations

import html
from typing import Any


def render(model: dict[str, Any]) -> str:
    rows = "".join(f"<li>{html.escape(f['place'] or '')} {html.escape(f['fix'])}</li>" for f in model["findings"])
    return f"<!doctype html><title>osler</title><h1>{html.escape(model['verdict']['text'])}</h1><ul>{rows}</ul>"
