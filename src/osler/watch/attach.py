"""What the import hook calls once torch is there: install the watcher, or leave the process as it was.

Light on purpose: the standard library only, until ``osler.watch.install`` is imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module


def attach() -> bool:
    """Install the watcher in this process. Never raises but ``KeyboardInterrupt``; says whether it worked."""
    try:
        import_module("osler.watch.install").install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "osler.watch.install"):
            log(f"not watched: {type(error).__name__}: {error}")
        return False
    return True


def log(text: str) -> None:
    """One line in the run folder's ``attach.log``, from where the supervisor passes it on."""
    run = os.environ.get("OSLER_RUN")
    if not run:
        return
    try:
        with open(os.path.join(run, "attach.log"), "a", encoding="utf-8") as file:
            file.write(f"pid {os.getpid()} {sys.executable}: {' '.join(text.split())[:500]}\n")
    except Exception:
        pass
