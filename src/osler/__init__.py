"""osler finds out why a neural network does not train, and proves it.

``osler run train.py`` watches an unmodified script. In code and notebooks::

    import osler
    with osler.watch(model, optimizer):
        ...            # your loop
    osler.log(val_loss=0.31)

Nothing heavy is imported until one of the two is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "log", "watch"]

if TYPE_CHECKING:
    from osler.live import log, watch


def __getattr__(name: str) -> Any:
    if name in ("log", "watch"):
        import importlib

        return getattr(importlib.import_module("osler.live"), name)
    raise AttributeError(f"module 'osler' has no attribute {name!r}")
