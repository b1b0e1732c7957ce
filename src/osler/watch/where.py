"""Where in the user's code: cached frame walks."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from osler.core.facts import Location

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple({os.path.realpath(p) + os.sep for p in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"])})
_CWD = os.getcwd() + os.sep
_known: dict[CodeType, bool] = {}
_short: dict[str, str] = {}


def is_user(code: CodeType) -> bool:
    """Whether the code belongs to the user: not a library, not the standard library, not osler, not generated."""
    known = _known.get(code)
    if known is None:
        name = code.co_filename
        known = not (name.startswith(("<frozen", "<string>", "<osler", "<__array_function__", "<eval_with_key>", _OWN)) or "site-packages" in name
                     or "dist-packages" in name or name.startswith(_STDLIB) or os.path.realpath(name).startswith(_STDLIB))
        _known[code] = known
    return known


def shorten(name: str) -> str:
    """Relative to the working directory when below it."""
    short = _short.get(name)
    if short is None:
        full = os.path.abspath(name) if not name.startswith("<") else name
        short = full[len(_CWD):] if full.startswith(_CWD) else full
        _short[name] = short.replace(os.sep, "/")
    return _short[name]


def locate(frame: FrameType) -> Location:
    return Location(shorten(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def user_location(limit: int = 6) -> tuple[Location | None, tuple[Location, ...]]:
    """Innermost user line of the current call stack, and the user's frames above it (innermost first, at most ``limit``)."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Location] = []
    while frame is not None and len(found) <= limit:
        if is_user(frame.f_code):
            found.append(locate(frame))
        frame = frame.f_back
    return (found[0], tuple(found[1:])) if found else (None, ())


def user_line() -> Location | None:
    """Innermost user line only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user(frame.f_code):
            return locate(frame)
        frame = frame.f_back
    return None


def library_line() -> str | None:
    """Innermost library line (not torch's own, not osler's) below the user's frame: where a framework really calls from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user(frame.f_code):
        name = frame.f_code.co_filename
        if "site-packages" in name and f"{os.sep}torch{os.sep}" not in name and not name.startswith(_OWN):
            return f"{name.split('site-packages' + os.sep, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def construction_line(instance: object) -> Location | None:
    """User line that constructs ``instance``: the innermost user frame that is not one of its own ``__init__`` frames."""
    frame: FrameType | None = sys._getframe(1)
    fallback = None
    while frame is not None:
        code = frame.f_code
        if is_user(code):
            own = code.co_name == "__init__" and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is instance
            if not own:
                return locate(frame)
            fallback = fallback or locate(frame)
        frame = frame.f_back
    return fallback
