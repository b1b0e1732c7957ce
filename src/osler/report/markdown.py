"""The little Markdown that catalogue pages are written in, as HTML: headings, paragraphs, lists, tables, code, links."""

from __future__ import annotations

import re
from html import escape

INLINE = re.compile(r"`([^`\n]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?://[^)\s]+)\)|(https?://[^\s<>()\"]+[^\s<>()\".,;])")
CALL = re.compile(r"(`[^`\n]+`|(?<![\w`.])[A-Za-z_][\w.]*\([^()\s]*\))")


def inline(text: str) -> str:
    rows, end = [], 0
    for m in INLINE.finditer(text):
        rows.append(escape(text[end:m.start()], quote=False))
        code, bold, soft, name, target, bare = m.groups()
        if code is not None:
            rows.append(f"<code>{escape(code, quote=False)}</code>")
        elif bold is not None:
            rows.append(f"<strong>{inline(bold)}</strong>")
        elif soft is not None:
            rows.append(f"<em>{inline(soft)}</em>")
        else:
            link = target or bare
            rows.append(f'<a href="{escape(link)}" rel="noreferrer">{escape(name or link, quote=False)}</a>')
        end = m.end()
    rows.append(escape(text[end:], quote=False))
    return "".join(rows)


def prose(text: str) -> str:
    """One line of a finding: `code` and whatever looks like a call set as code, nothing else interpreted."""
    parts = CALL.split(text)
    return "".join(f"<code>{escape(p.strip('`'), quote=False)}</code>" if i % 2 else escape(p, quote=False) for i, p in enumerate(parts))


def render(text: str, level: int = 4) -> str:
    """Headings become ``h<level>``: a page inside a page must not outrank it."""
    rows: list[str] = []
    for fence, block in blocks(text):
        lines = block.splitlines()
        if fence:
            rows.append(f"<pre><code>{escape(block, quote=False)}</code></pre>")
        elif lines[0].startswith("#"):
            rows.append(f"<h{level}>{inline(lines[0].lstrip('# '))}</h{level}>")
            if len(lines) > 1:
                rows.append(render("\n".join(lines[1:]), level))
        elif lines[0].startswith("|"):
            rows.append(table(lines))
        elif re.match(r"[-*] ", lines[0]):
            items = re.split(r"\n(?=[-*] )", block)
            rows.append("<ul>" + "".join(f"<li>{inline(' '.join(i[2:].split()))}</li>" for i in items) + "</ul>")
        else:
            rows.append(f"<p>{inline(' '.join(block.split()))}</p>")
    return "\n".join(rows)


def blocks(text: str) -> list[tuple[bool, str]]:
    """(is code, text) pieces between blank lines and fences."""
    found: list[tuple[bool, str]] = []
    for i, piece in enumerate(re.split(r"^```[^\n]*\n?", text, flags=re.MULTILINE)):
        if i % 2:
            found.append((True, piece.rstrip("\n")))
        else:
            found += [(False, p.strip("\n")) for p in re.split(r"\n\s*\n", piece) if p.strip()]
    return found


def table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if not re.match(r"^\|[\s\-|:]+\|$", line)]
    head, *body = rows
    cells = "".join(f"<th>{inline(c)}</th>" for c in head)
    return f"<table><tr>{cells}</tr>{''.join('<tr>' + ''.join(f'<td>{inline(c)}</td>' for c in r) + '</tr>' for r in body)}</table>"
