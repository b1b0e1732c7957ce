"""Where the user's script divides its rows, and whether chance decides which row goes where. Read from the text (see ``lineage``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from osler.core.facts import Location
from osler.core.window import Window
from osler.rules.lineage import lineage
from osler.rules.lineage_values import FEATURE, LABEL, Split
from osler.rules.script import FUNCTIONS, LOOPS, call_name, calls, parse, root, targets, trains, words

LONGEST, MOST = 2500, 60
"""Lines of a file that is followed, and divisions in it: beyond them it is a library."""
DRAWS = frozenset(("randperm", "permutation", "shuffle", "rand", "random", "uniform", "choice", "sample", "multinomial", "randint", "integers", "bernoulli"))
GROUP_NAME = re.compile(
    r"(^|[_.])(patients?|subjects?|subj|users?|speakers?|persons?|people|participants?|sessions?|recordings?|videos?|clips?|docs?|documents?|authors?|sites?|hospitals?|animals?|"
    r"famil(y|ies)|devices?|machines?|stores?|customers?|clients?|players?|drivers?|house(hold)?s?|homes?|plates?|slides?|wells?|donors?|writers?|riders?|bearings?|engines?|"
    r"trials?|groups?|entit(y|ies)|owners?|pids?|uids?|gids?|sids?|who|parents?|scenes?|molecules?|scaffolds?|proteins?|workers?|students?|schools?|trees?|plots?|"
    r"farms?|cars?|vehicles?|sensors?|stations?|mice|mouse|cows?|dogs?|source|src|original|orig|origin|parent|identity|identities|accounts?|companies|company|shops?|thread|"
    r"article|articles|book|books|song|songs|track|tracks|album|artist|movie|product|products|instrument|episode|episodes)(_?(ids?|idx|index|no|num|number|of|key|names?|codes?))?s?($|_)", re.I)
TIME_WORD = re.compile(r"(^|_)(time|times|timestamps?|dates?|days?|hours?|hourly|daily|weeks?|months?|years?|lags?|series|forecast\w*|horizon|temporal|autoreg\w*|rolling|walk|history|hist|"
                       r"stock|demand|sensor|signal|signals|window|windows|lookback|stride|hop|ticks?|seasonal|trend|ar|past|future|recording|stream|drift|t0|tt|ts)(_|$|\d)", re.I)


@dataclass(frozen=True, slots=True)
class Site:
    """One division of rows: ``line`` of the cut, ``drawn``: line where chance orders or picks the rows (``None``: by order, group or a given list)."""

    file: str
    line: int
    split: Split
    drawn: int | None
    in_epochs: bool

    @property
    def at(self) -> Location:
        """The line to change."""
        return Location(self.file, self.drawn if self.drawn is not None else self.line)


def sites(window: Window) -> list[Site]:
    """All divisions in the user's files, in order of execution within a file; training batches are none."""
    return [s for file, text in window.sources.items() for s in _sites(file, text)]


def drawn_split(window: Window) -> Site | None:
    """The random division of rows, if there is one: a cut whose index chance has ordered."""
    found = [s for s in sites(window) if s.drawn is not None]
    return next((s for s in found if _sided(s)), found[0] if found else None)


def _sided(site: Site) -> bool:
    text = site.split.text
    return bool(re.search(r"train_test_split|random_split|Subset|[:\]]", text))


@lru_cache(maxsize=16)
def _sites(file: str, text: str) -> tuple[Site, ...]:
    if text.count("\n") > LONGEST:
        return ()
    found, module = lineage(text), parse(text)
    if found is None or module is None or len(found.splits) > MOST:
        return ()
    made = [Site(file, s.line, s, drawn_at(module, s), in_epoch_loop(module, s.line)) for s in found.splits]
    if not any(s.drawn is not None for s in made):
        made += lists(file, module)
    return tuple(dict.fromkeys(made))


def lists(file: str, module: ast.Module) -> list[Site]:
    """Lists of indices or names that are shuffled and cut by position: their rows are not in the text."""
    found: list[Site] = []
    loops = [(n.lineno, n.end_lineno or 0) for n in ast.walk(module) if isinstance(n, LOOPS) and trains(n)]
    if not any(True for _ in calls(module, "shuffle", "randperm", "permutation", "sample")):
        return []
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or any(a <= node.lineno <= b for a, b in loops) or len(found) > MOST:
            continue
        for cut in ast.walk(node.value):
            if isinstance(cut, ast.Subscript) and isinstance(cut.slice, ast.Slice) and (cut.slice.lower is None) != (cut.slice.upper is None) and (name := root(cut.value)):
                line = shuffled(module, name, node.lineno)
                if line is not None:
                    split = Split((node.lineno,), "", cut, ast.unparse(cut), frozenset(), ())
                    found.append(Site(file, node.lineno, split, line, False))
    return found if len({s.split.text for s in found}) >= 2 else []


def drawn_at(module: ast.Module, split: Split) -> int | None:
    """The line of the random call that decides which rows a cut takes."""
    node = split.node
    if isinstance(node, ast.Call):
        if split.how == "random":
            return node.lineno
        source = node.args[1:] if call_name(node) == "Subset" else []
        return next((line for a in source if (line := chance(module, a)) is not None), None)
    if not isinstance(node, ast.Subscript):
        return None
    index = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    if not isinstance(index, ast.Slice):
        return chance(module, index)
    name = root(node.value)
    return shuffled(module, name, node.lineno) if name is not None else None


def chance(module: ast.Module, node: ast.AST, hops: int = 5) -> int | None:
    """The line of the random call that an index comes from, through assignments; ``None`` when no chance is in it.

    Indices that pass through rows of unique names (groups) are no draw of rows.
    """
    seen: set[str] = set()
    queue: list[ast.AST] = [node]
    for _ in range(hops):
        following: list[ast.AST] = []
        for part in queue:
            if any(call_name(c) in ("unique", "isin", "in1d", "groupby", "nunique") for c in calls(part)):
                return None
            for c in calls(part):
                if call_name(c) in DRAWS and not _over_names(module, c):
                    return c.lineno
                if call_name(c) == "split" and isinstance(c.func, ast.Attribute):
                    made = _folds(module, c.func.value)
                    if made is not None:
                        return made
            for name in names_in(part) - seen:
                seen.add(name)
                if FEATURE.match(name) or LABEL.match(name):
                    continue
                if (line := _shuffle_call(module, name)) is not None:
                    return line
                following += list(given_to(module, name))
        queue = following
    return None


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {f"self.{n.attr}" for n in ast.walk(node) if isinstance(n, ast.Attribute)
                                                                       and isinstance(n.value, ast.Name) and n.value.id == "self"}


def given_to(module: ast.Module, name: str) -> Iterator[ast.AST]:
    """Expressions that a name is bound to, also as a parameter of a function of the user's."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in targets(node) and node.value is not None:
            yield node.value
        elif isinstance(node, ast.For) and name in targets(node):
            yield node.iter
        elif isinstance(node, FUNCTIONS) and (parameters := [a.arg for a in node.args.args]) and name in parameters:
            place = parameters.index(name) - (parameters[0] == "self")
            owner = next((k.name for k in ast.walk(module) if isinstance(k, ast.ClassDef) and node in k.body), None) if node.name == "__init__" else node.name
            for c in calls(module, owner or node.name):
                if place >= 0:
                    yield from ((k.value for k in c.keywords if k.arg == name) if len(c.args) <= place else (c.args[place],))


def _shuffle_call(module: ast.Module, name: str) -> int | None:
    return next((c.lineno for c in calls(module, "shuffle") if c.args and root(c.args[0]) == name and not GROUP_NAME.search(name)), None)


def _over_names(module: ast.Module, call: ast.Call) -> bool:
    """A draw of groups (``rng.permutation(patients)``, ``permutation(np.unique(g))``, ``permutation(n_subjects)``), not of rows."""
    inner = {w for a in [*call.args, *(k.value for k in call.keywords)] for w in words(a)}
    if any(GROUP_NAME.search(w) for w in inner) or "unique" in inner:
        return True
    return any("unique" in words(v) for w in inner for v in given_to(module, w))


def _folds(module: ast.Module, holder: ast.expr) -> int | None:
    """The construction of a splitter that shuffles."""
    made = [holder] if isinstance(holder, ast.Call) else [v for v in given_to(module, root(holder) or "") if isinstance(v, ast.Call)]
    for c in made:
        if isinstance(c, ast.Call) and (call_name(c) in ("ShuffleSplit", "StratifiedShuffleSplit", "RepeatedKFold")
                                        or (call_name(c) in ("KFold", "StratifiedKFold") and any(k.arg == "shuffle" and getattr(k.value, "value", None) is True for k in c.keywords))):
            return c.lineno
    return None


def shuffled(module: ast.Module, name: str, before: int, hops: int = 4) -> int | None:
    """The line that put the rows of ``name`` in random order before they are cut by position."""
    queue, seen = [name], set()
    for _ in range(hops):
        following: list[str] = []
        for here in queue:
            seen.add(here)
            if (line := _shuffle_call(module, here)) is not None:
                return line
            for value in given_to(module, here):
                if any(call_name(c) in ("randperm", "permutation", "shuffle") and not _over_names(module, c) for c in calls(value)):
                    return value.lineno  # type: ignore[attr-defined,no-any-return]
                if any(call_name(c) == "sample" and any(k.arg == "frac" for k in c.keywords) for c in calls(value)):
                    return value.lineno  # type: ignore[attr-defined,no-any-return]
                if isinstance(value, ast.Subscript) and not isinstance(value.slice, ast.Slice) and (line := chance(module, value.slice, 3)) is not None \
                        and not any(call_name(c) in ("randint", "integers") for c in calls(module) if c.lineno == line):
                    return line
                if isinstance(value, ast.Tuple):
                    inner = [e for e in value.elts if isinstance(e, ast.Subscript) and root(e) == here and not isinstance(e.slice, ast.Slice)]
                    if inner and (line := chance(module, inner[0].slice, 3)) is not None:
                        return line
                inner_name = root(value)
                following += [inner_name] if inner_name is not None and inner_name not in seen else []
        queue = following
    return None


def in_epoch_loop(module: ast.Module, line: int) -> bool:
    """Whether a cut is made again and again inside a loop that trains one model."""
    for node in ast.walk(module):
        if isinstance(node, LOOPS) and node.lineno < line <= (node.end_lineno or 0) and trains(node):
            made = any(call_name(c)[:1].isupper() and ("Net" in call_name(c) or call_name(c) in ("Sequential", "Linear", "Adam", "AdamW", "SGD")) for c in calls(node))
            builds = any(re.search(r"(make|build|create|get|init|new)_?(model|net)|reset_parameters|load_state_dict", call_name(c)) for c in calls(node))
            if not made and not builds and not (isinstance(node, ast.For) and any(call_name(c) == "split" for c in calls(node.iter))):
                return True
    return False


def says_time(window: Window) -> set[str]:
    """Words of the script that speak of time."""
    found: set[str] = set()
    for text in window.sources.values():
        module = parse(text)
        for word in words(module) if module is not None else ():
            if (m := TIME_WORD.search(word)) is not None and word not in ("time", "perf_counter", "timeit"):
                found.add(m.group(2).lower())
    return found


def group_names(window: Window) -> set[str]:
    """Names the script binds that speak of entities."""
    found: set[str] = set()
    for text in window.sources.values():
        module = parse(text)
        for node in ast.walk(module) if module is not None else ():
            if isinstance(node, ast.stmt):
                found |= {t for t in targets(node) if GROUP_NAME.search(t)}
            elif isinstance(node, ast.comprehension):
                found |= {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name) and GROUP_NAME.search(n.id)}
            elif isinstance(node, ast.arg) and GROUP_NAME.search(node.arg):
                found.add(node.arg)
    return found
