"""What runs inside the training process: taps record facts and rows, nothing is judged here.

``install`` patches torch once; ``session`` holds the state; ``taps/`` has one file per observed thing; ``trace`` records
a few steps operation by operation; ``experiments/`` asks questions in a forked copy of the process.

The package is also the function: ``osler.watch(model, optimizer)`` means ``osler.live.watch``, whichever of the two Python
has bound to that name.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from osler.live import watch

        return watch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
