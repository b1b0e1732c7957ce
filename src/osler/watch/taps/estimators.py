"""scikit-learn in the watched process: what was fitted on which rows, and which rows were divided. Nothing is imported for it.

Modules that are there already are patched at once, others as soon as they have been executed. Classes are patched where ``fit`` is looked up, so
that clones, pickles and workers see the classes they know; ``train_test_split`` is watched from inside, as scripts often hold
the function before torch is imported. Rows are told by a fingerprint of a few of them. What the facts mean is for the rules.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from osler.watch.session import Session
from osler.watch.where import user_line

SPLITS = "sklearn.model_selection._split"
PACKAGES = ("imblearn", *(f"sklearn.{p}" for p in ("preprocessing", "feature_selection", "decomposition", "impute", "feature_extraction", "discriminant_analysis",
                                                  "cross_decomposition", "random_projection", "kernel_approximation", "manifold", "cluster", "compose")))
FITS, TRANSFORMS = ("fit", "fit_transform", "fit_resample", "partial_fit"), ("transform", "fit_transform", "fit_resample")
FEWEST, MOST, BY_LINE, KEPT = 20, 300, 3, 400
DONE = "_osler_watches"


class Estimators:
    """Fits, the tables that came out of them, and divisions, in order."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.count = 0
        self.lines: dict[Any, int] = {}
        self.fitted: dict[int, tuple[Any, int, int | None]] = {}
        self.made: dict[tuple[int, int], set[int]] = {}
        self.inside = threading.local()

    def watching(self) -> bool:
        """The training process's main thread, not inside a call that is watched already."""
        session = self.session
        return not getattr(self.inside, "depth", 0) and self.count < MOST and session.guard.armed("sklearn") and threading.get_ident() == session.main_thread and not session.in_child

    def fit(self, estimator: Any, method: str, x: Any, y: Any) -> None:
        """An estimator was fitted."""
        rows = length(x)
        if rows < FEWEST:
            return
        at = user_line()
        key = (at, type(estimator).__name__)
        self.lines[key] = self.lines.get(key, 0) + 1
        number = self.count
        self.count += 1
        mark = fingerprint(x)
        self.fitted[id(estimator)] = weakref.ref(estimator), number, mark
        if self.lines[key] > BY_LINE:
            return
        self.session.fact("sklearn-fit", at, number=number, module=type(estimator).__module__, method=method, rows=rows, columns=columns(x), y=y is not None,
                          place=place(x), key=mark, parents=sorted(self.sources(x)), steps=steps(estimator), **{"class": type(estimator).__name__})

    def transformed(self, estimator: Any, x: Any, result: Any) -> None:
        """The very rows an estimator was fitted on came out of it changed."""
        known = self.fitted.get(id(estimator))
        if known is None or known[0]() is not estimator or len(self.made) >= KEPT or known[2] is None or fingerprint(x) != known[2]:
            return
        result = result[0] if isinstance(result, tuple) and result else result
        rows = length(result)
        mark = fingerprint(result)
        if rows >= FEWEST and mark is not None:
            self.made.setdefault((rows, mark), set()).add(known[1])

    def sources(self, x: Any) -> set[int]:
        """Numbers of the fits that a table came out of."""
        mark = fingerprint(x) if self.made else None
        return self.made.get((length(x), mark), set()) if mark is not None else set()

    def divided(self, function: str, arrays: tuple[Any, ...], sizes: list[int] | None, **how: Any) -> None:
        """Rows are divided."""
        rows = length(arrays[0]) if arrays else 0
        at = user_line()
        key = (at, function)
        self.lines[key] = self.lines.get(key, 0) + 1
        if rows < FEWEST or self.lines[key] > BY_LINE:
            return
        number = self.count
        self.count += 1
        state = how.pop("random_state", None)
        self.session.fact("sklearn-split", at, number=number, function=function, rows=rows, sizes=sizes, random_state=state if isinstance(state, int | None) else "generator",
                          places=[place(a) for a in arrays[:6]], keys=[fingerprint(a) for a in arrays[:6]], made_by=sorted(set().union(*(self.sources(a) for a in arrays[:6]))), **how)


# -- tables --------------------------------------------------------------------------------------------------------------


def steps(estimator: Any) -> list[str]:
    """Classes inside an estimator that is made of others, with their modules."""
    found: list[str] = []
    queue = [t[1] for name in ("transformers_", "transformer_list", "steps") for t in getattr(estimator, name, None) or ()]
    while queue and len(found) < 20:
        inner = queue.pop(0)
        queue += [t[1] for t in getattr(inner, "steps", None) or ()]
        found += [f"{type(inner).__module__}.{type(inner).__name__}"] if not isinstance(inner, str) else []
    return found


def length(x: Any) -> int:
    shape = getattr(x, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int | np.integer):
        return int(shape[0])
    return len(x) if isinstance(x, list | tuple) else 0


def columns(x: Any) -> int | None:
    shape = getattr(x, "shape", None)
    return int(shape[1]) if isinstance(shape, tuple) and len(shape) > 1 and isinstance(shape[1], int | np.integer) else None


def place(x: Any) -> int | None:
    """Where an array's numbers lie."""
    return int(x.__array_interface__["data"][0]) if isinstance(x, np.ndarray) else None


def fingerprint(x: Any) -> int | None:
    """Of five rows, as float32 where they are numbers: a copy or another width of number has the same."""
    n = length(x)
    if n < FEWEST:
        return None
    rows = [0, n // 4, n // 2, 3 * n // 4, n - 1]
    kind = type(x).__name__
    if kind in ("DataFrame", "Series"):
        part = x.iloc[rows].to_numpy()
    elif isinstance(x, list):
        part = [x[i] for i in rows]
    elif isinstance(x, np.ndarray) or hasattr(x, "toarray"):
        part = x[rows] if isinstance(x, np.ndarray) else x.tocsr()[rows].toarray()
    else:
        return None
    with np.errstate(all="ignore"):
        try:
            return zlib.crc32(np.ascontiguousarray(part, dtype=np.float32).tobytes())
        except (TypeError, ValueError):
            return zlib.crc32(repr(part).encode("utf-8", "replace"))


# -- patches -------------------------------------------------------------------------------------------------------------


def watch_method(owner: Estimators, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fit`` or ``transform`` of a class, telling ``owner`` what went in and what came out."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not owner.watching():
            return original(self, *args, **kwargs)
        owner.inside.depth = 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            owner.inside.depth = 0
        try:
            x = args[0] if args else kwargs.get("X", kwargs.get("raw_documents", kwargs.get("y")))
            if name in FITS:
                owner.fit(self, name, x, args[1] if len(args) > 1 else kwargs.get("y"))
            if name in TRANSFORMS and id(self) in owner.fitted:
                owner.transformed(self, x, result)
        except Exception:
            owner.session.guard.failed("sklearn")
        return result

    return method


def watch_split(owner: Estimators, original: Callable[..., Any]) -> Callable[..., Any]:
    """``split`` of a splitter."""

    @functools.wraps(original)
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if owner.watching() and sys._getframe(1).f_globals.get("__name__") != SPLITS:
            try:
                given = dict(zip(("X", "y", "groups"), args, strict=False)) | kwargs
                owner.divided(type(self).__name__, (given.get("X"),), None, shuffle=bool(getattr(self, "shuffle", "Shuffle" in type(self).__name__)),
                              stratify="Stratified" in type(self).__name__, groups=given.get("groups") is not None, random_state=getattr(self, "random_state", None))
            except Exception:
                owner.session.guard.failed("sklearn")
        return result

    return split


def watch_sizes(owner: Estimators, original: Callable[..., Any]) -> Callable[..., Any]:
    """What ``train_test_split`` asks for the sizes of both parts: the division itself, whoever holds the function."""

    @functools.wraps(original)
    def sizes(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        frame: FrameType = sys._getframe(1)
        if frame.f_code.co_name == "train_test_split" and owner.watching():
            try:
                own = frame.f_locals
                owner.divided("train_test_split", tuple(own["arrays"]), [int(n) for n in result], shuffle=bool(own["shuffle"]), stratify=own["stratify"] is not None,
                              groups=False, random_state=own["random_state"])
            except Exception:
                owner.session.guard.failed("sklearn")
        return result

    return sizes


def wanted(name: str) -> bool:
    return name in (SPLITS, "sklearn.base") or (name.startswith(("sklearn.", "imblearn.")) and name.startswith(PACKAGES))


def patch(owner: Estimators, module: ModuleType) -> None:
    """All classes of a module, once."""
    name = module.__name__
    if name == SPLITS and not hasattr(module._validate_shuffle_split, DONE):
        module._validate_shuffle_split = marked(watch_sizes(owner, module._validate_shuffle_split))  # type: ignore[attr-defined]
    for cls in list(vars(module).values()):
        if not isinstance(cls, type) or cls.__module__ != name or (name == "sklearn.base" and cls.__name__ != "TransformerMixin"):
            continue
        for method in ("split",) if name == SPLITS else {*FITS, *TRANSFORMS}:
            original = cls.__dict__.get(method)
            if callable(original) and not isinstance(original, type) and hasattr(original, "__code__") and not hasattr(original, DONE):
                setattr(cls, method, marked(watch_split(owner, original) if name == SPLITS else watch_method(owner, original, method)))


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, DONE, True)
    return function


class Finder:
    """A ``sys.meta_path`` finder that finds nothing itself and patches a wanted module once it has been executed."""

    def __init__(self, owner: Estimators) -> None:
        self.owner = owner
        self.asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if self.asking or not name.startswith(("sklearn.", "imblearn.")) or not wanted(name):
            return None
        self.asking = True
        try:
            return self.spec(name, path, target)
        except Exception:
            return None  # the import machinery asks the others itself
        finally:
            self.asking = False

    def spec(self, name: str, path: Any, target: Any) -> Any:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1:]:
            find = getattr(finder, "find_spec", None)
            found = find(name, path, target) if find is not None else None
            if found is None:
                continue
            loader = found.loader
            original = getattr(loader, "exec_module", None)
            if original is None:
                return found

            try:
                loader.exec_module = executing(self.owner, loader, original)
            except AttributeError:
                pass  # an exotic loader
            return found
        return None


def executing(owner: Estimators, loader: Any, original: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """``exec_module`` of one loader, once, with the patches behind it."""

    def exec_module(module: ModuleType) -> None:
        loader.__dict__.pop("exec_module", None)
        original(module)
        try:
            patch(owner, module)
        except Exception:
            owner.session.guard.failed("sklearn")

    return exec_module


def install(session: Session, estimators: Estimators) -> None:
    for name, module in list(sys.modules.items()):
        if wanted(name) and isinstance(module, ModuleType) and "__spec__" in vars(module):
            patch(estimators, module)
    place = next((i for i, f in enumerate(sys.meta_path) if type(f).__name__ != "Hook"), len(sys.meta_path))
    sys.meta_path.insert(place, Finder(estimators))
