"""Whole files that appear complete or not at all, and JSON that may be absent or torn. Streams are in ``segments``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> int:
    """Write under a temporary name, then rename. Returns the size in bytes; raises ``OSError``."""
    data = text.encode("utf-8", "replace")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return len(data)


def write_json(path: Path, obj: Any) -> int:
    """Write ``obj`` as JSON so that a reader sees the old file or the new one, never half of either."""
    return write_text(path, json.dumps(obj, indent=1, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; ``None`` when there is no such file or it holds no JSON object."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
