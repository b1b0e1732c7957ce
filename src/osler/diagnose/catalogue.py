"""The catalogue: every rule, listed by hand, and what each cause means.

A rule file under ``osler/rules/`` that is not imported here does not exist; a test compares the two.
"""

from __future__ import annotations

import difflib

from osler.core.errors import UsageError
from osler.core.rule import Rule
from osler.diagnose.meanings import BY_GROUP, GROUP, MEANINGS

RULES: tuple[Rule, ...] = ()


def rule_for(cause: str) -> Rule | None:
    return next((r for r in RULES if r.cause == cause), None)


def known() -> frozenset[str]:
    """Every id that a finding may carry: the vocabulary and whatever the rules add."""
    return frozenset(MEANINGS) | {r.cause for r in RULES}


def groups() -> frozenset[str]:
    return frozenset(BY_GROUP) | {r.group for r in RULES}


def nearest(word: str, choices: frozenset[str] | set[str]) -> str:
    """`` Did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(word, sorted(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def meaning(cause: str) -> str:
    """One line; for a rule outside the vocabulary the first sentence of its docstring."""
    if cause in MEANINGS:
        return MEANINGS[cause]
    found = rule_for(cause)
    return found.text.split("\n\n")[0].replace("\n", " ").rstrip(".") if found else ""


def explain(cause: str) -> str:
    """The page of a cause as Markdown.

    Raises:
        UsageError: nothing of that name is in the catalogue.
    """
    found = rule_for(cause)
    if found is None and cause not in MEANINGS:
        raise UsageError(f"no cause is called {cause!r}.{nearest(cause, known())} Try: osler explain --list")
    if found is None:
        return f"# {cause}\n\n{MEANINGS[cause].capitalize()}.\n\nGroup: {GROUP[cause]}. There is no rule yet that looks for it.\n"
    options = "".join(f"| `{name}` | `{default!r}` |\n" for name, default in found.options.items())
    table = f"\n**Options**\n\n| option | default |\n|---|---|\n{options}" if options else ""
    return f"# {found.cause}\n\n{found.text}\n\nGroup: {found.group}. Status: {found.status}.\n{table}"
