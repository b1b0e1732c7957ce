"""What the user chose: which causes to look for, which to leave out, and the options of each rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from osler.core.errors import UsageError
from osler.diagnose import catalogue

KEYS = frozenset(("select", "ignore", "rules"))


@dataclass(frozen=True, slots=True)
class Config:
    """``select`` and ``ignore`` hold causes or whole groups; an empty ``select`` means all.

    Attributes:
        options: cause to the keyword arguments of its rule.
        path: the file it was read from, if any.
    """

    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    path: Path | None = None

    def selects(self, cause: str) -> bool:
        return not self.select or not self.select.isdisjoint((cause, *catalogue.groups_of(cause)))

    def ignores(self, cause: str) -> bool:
        return not self.ignore.isdisjoint((cause, *catalogue.groups_of(cause)))


def load(start_dir: str | Path = ".", overrides: Mapping[str, Any] | None = None) -> Config:
    """``[tool.osler]`` of the nearest ``pyproject.toml``, then ``overrides`` (the command line) on top.

    ``overrides`` has the same keys as the table: ``select`` replaces, ``ignore`` and ``rules`` add.

    Raises:
        UsageError: an unknown key, cause or option, or a value of the wrong type.
    """
    path = find(Path(start_dir))
    table = read(path) if path is not None else {}
    base = parse(table, str(path)) if table else Config()
    extra = parse(overrides or {}, "command line")
    options = {cause: dict(chosen) for cause, chosen in base.options.items()}
    for cause, chosen in extra.options.items():
        options.setdefault(cause, {}).update(chosen)
    return Config(extra.select or base.select, base.ignore | extra.ignore, options, path if table else None)


def find(start: Path) -> Path | None:
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file():
            return folder / "pyproject.toml"
    return None


def read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None
    if "osler" not in text:
        return {}
    toml = parser()
    if toml is None:
        if "[tool.osler" not in text:
            return {}
        raise UsageError(f"reading [tool.osler] in {path} needs Python 3.11 or newer, or the package tomli. Try: pip install tomli")
    try:
        table = toml.loads(text).get("tool", {}).get("osler", {})
    except ValueError as problem:
        raise UsageError(f"{path} is not valid TOML: {problem}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.osler] must be a table")
    return table


def parser() -> ModuleType | None:
    """``tomllib`` (Python 3.11 and later) or ``tomli``; ``None`` where neither is there."""
    import importlib

    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def parse(table: Mapping[str, Any], source: str) -> Config:
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{source}: [tool.osler] has no key {key!r}.{catalogue.nearest(key, KEYS)}")
    rules = table.get("rules", {})
    if not isinstance(rules, Mapping):
        raise UsageError(f"{source}: 'rules' must be a table of rules, e.g. [tool.osler.rules.lr-too-high]")
    return Config(names(table, "select", source), names(table, "ignore", source),
                  {cause: options(cause, chosen, source) for cause, chosen in rules.items()})


def names(table: Mapping[str, Any], key: str, source: str) -> frozenset[str]:
    raw = table.get(key, ())
    words = [raw] if isinstance(raw, str) else raw
    if not isinstance(words, list | tuple | set | frozenset) or not all(isinstance(w, str) for w in words):
        raise UsageError(f"{source}: {key!r} must be a list of causes or groups, not {raw!r}")
    known = catalogue.known() | catalogue.groups()
    for word in words:
        if word not in known:
            raise UsageError(f"{source}: {key!r} names {word!r}, which is no cause.{catalogue.nearest(word, known)}")
    return frozenset(words)


def options(cause: str, chosen: Any, source: str) -> dict[str, Any]:
    rule = catalogue.rule_for(cause)
    if rule is None:
        rules = frozenset(r.cause for r in catalogue.RULES)
        raise UsageError(f"{source}: no rule is called {cause!r}.{catalogue.nearest(cause, rules)}")
    if not isinstance(chosen, Mapping):
        raise UsageError(f"{source}: the options of {cause!r} must be a table, not {chosen!r}")
    result = {}
    for raw, value in chosen.items():
        name = str(raw).replace("-", "_")
        if name not in rule.options:
            have = frozenset(rule.options)
            hint = catalogue.nearest(name, have) or (f" It has: {', '.join(sorted(have))}." if have else " It has none.")
            raise UsageError(f"{source}: {cause!r} has no option {raw!r}.{hint}")
        result[name] = typed(value, rule.options[name], f"{source}: option {raw!r} of {cause!r}")
    return result


def typed(value: Any, default: Any, what: str) -> Any:
    """``value`` in the type of ``default``."""
    if default is None:
        return value
    if isinstance(default, bool) or isinstance(value, bool):
        good = isinstance(value, bool) and isinstance(default, bool)
    elif isinstance(default, float):
        good = isinstance(value, int | float)
        value = float(value) if good else value
    elif isinstance(default, tuple | list | set | frozenset):
        good = isinstance(value, list | tuple)
        value = type(default)(value) if good else value
    else:
        good = isinstance(value, type(default))
    if not good:
        raise UsageError(f"{what} must be like {default!r}, not {value!r}")
    return value
