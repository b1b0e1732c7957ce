"""Records a few steps operation by operation: a TorchFunctionMode armed for those steps only.

Armed only where it changes nothing: not under torch.compile, not while another function mode is active, not while a
MultiheadAttention is in evaluation mode (its fast path looks at active modes). Tensors are remembered weakly.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterable
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from osler.core.trace import LEAF, OLD, PARAMETER, REQUIRES_GRAD, STALE_GRAPH
from osler.watch.compiler import FRAME, quiet
from osler.watch.halves import half_figures
from osler.watch.modules import in_functorch
from osler.watch.operands import figures
from osler.watch.session import Session
from osler.watch.where import is_user, shorten

MASKS = frozenset(("masked_fill", "masked_fill_", "full", "full_like", "where", "tensor", "triu", "tril", "new_full", "fill_", "mul", "setitem_", "cat", "stack"))
BIRTHS = {"log": "log-of-zero", "log2": "log-of-zero", "log10": "log-of-zero", "log1p": "log-of-zero", "div": "division-by-zero", "div_": "division-by-zero",
          "reciprocal": "division-by-zero", "sqrt": "sqrt-of-negative", "exp": "exp-overflow", "softmax": "softmax-of-masked-row", "log_softmax": "softmax-of-masked-row",
          "pow": "pow-of-negative", "rsqrt": "division-by-zero"}
MAX_OPS = 6000
MAX_SECONDS = 0.25
GETTERS = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
IGNORED = frozenset((
    "size", "dim", "numel", "__len__", "stride", "is_floating_point", "is_complex", "__repr__", "__hash__", "__format__", "ndimension",
    "nelement", "element_size", "is_contiguous", "get_device", "storage_offset", "untyped_storage", "storage", "data_ptr", "backward",
    "register_hook", "retain_grad", "is_same_size", "has_names", "__deepcopy__", "__reduce_ex__", "is_signed", "is_conj", "is_neg",
    "is_inference", "type_promotion", "result_type", "can_cast", "_is_view", "__dir__", "manual_seed", "is_tensor", "is_nonzero",
    "broadcast_shapes", "set_printoptions", "get_default_dtype", "is_shared", "share_memory_", "is_pinned", "as_subclass",
    "is_distributed", "dim_order", "_record_function_enter_new", "_record_function_exit", "_record_function_exit._RecordFunction", "_set_grad_enabled", "random_", "__cuda_array_interface__", "module_load", "is_leaf", "zero_",
))
DUNDER = {"__getitem__": "getitem", "__setitem__": "setitem_", "__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow",
          "__rpow__": "pow", "__ipow__": "pow_", "__rsub__": "sub", "__rtruediv__": "div", "__truediv__": "div", "__neg__": "neg",
          "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__div__": "div", "__rdiv__": "div",
          "__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_", "__idiv__": "div_", "__eq__": "eq",
          "__ne__": "ne", "__gt__": "gt", "__lt__": "lt", "__ge__": "ge", "__le__": "le", "__and__": "logical_and",
          "__or__": "logical_or", "__invert__": "logical_not", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide",
          "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "absolute": "abs",
          "greater": "gt", "less": "lt", "rsub": "sub"}
POSITIONAL = {"softmax": (None, "dim"), "log_softmax": (None, "dim"), "dropout": (None, "p", "training", "inplace"), "cat": (None, "dim"),
              "stack": (None, "dim"), "sum": (None, "dim"), "mean": (None, "dim"), "argmax": (None, "dim"), "max": (None, "dim"),
              "transpose": (None, "dim0", "dim1"), "squeeze": (None, "dim"), "unsqueeze": (None, "dim"), "pow": (None, "exponent"),
              "scaled_dot_product_attention": (None, None, None, "attn_mask", "dropout_p", "is_causal"),
              "requires_grad_": (None, "requires_grad"), "clamp": (None, "min", "max"), "dropout1d": (None, "p", "training"),
              "dropout2d": (None, "p", "training"), "alpha_dropout": (None, "p", "training"), "logsumexp": (None, "dim"),
              "normalize": (None, "p", "dim"), "masked_fill": (None, None, "value"), "flip": (None, "dims")}


def plain_name(func: Any) -> str | None:
    """Name of an operation as traces write it; ``None`` for what is not recorded."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        return str(name) if name in GETTERS else None
    if name is None or name in IGNORED or name in ("__set__", "__delete__"):
        return None
    return DUNDER.get(str(name), str(name))


def tensors_in(values: Iterable[Any], depth: int = 2) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif depth and isinstance(value, list | tuple):
            found.extend(tensors_in(value, depth - 1))
        elif depth and isinstance(value, dict):
            found.extend(tensors_in(value.values(), depth - 1))
    return found


def grad_fn(tensor: torch.Tensor) -> Any:
    """The tensor's node, ``None`` where torch refuses to make one (a view changed in place across grad modes)."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def levelled(original: Any) -> Any:
    """``warnings.warn`` for armed steps: a call that passes through the recorder has three frames more between the warning
    and the line it blames (the recorder, torch's dispatcher, the function's first entry); they are not counted."""

    def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        extra, level = 0, 1
        while frame is not None and level < stacklevel + extra:
            frame = frame.f_back
            level += 1
            if frame is not None and frame.f_code is Tracer.__torch_function__.__code__:
                extra += 3
        original(message, category, stacklevel + extra + 1, *args, **kwargs)

    return warn

seen_figures, seen_halves = quiet(figures), quiet(half_figures)


class Tracer(TorchFunctionMode):  # type: ignore[misc]
    """One recorder, armed and disarmed many times; each stretch becomes one trace file."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.armed = False
        self.locate = False
        self.paused = 0
        self.count = 0
        self.stack: list[int] = []
        self.thread = 0
        self._warn: Any = warnings.warn
        self.node_ops: list[tuple[int, int]] = []
        self._names: dict[Any, str | None] = {}
        self._clear()

    def _clear(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.tensors: list[list[Any]] = []
        self.files: dict[str, int] = {}
        self._tids: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.node_ops = []
        self.spent = 0.0
        self.truncated = False
        self.why = ""
        self.first_step = 0
        self.stack = []

    # -- arming ------------------------------------------------------------------------------------------------

    def arm(self, why: str) -> bool:
        if self.armed or self.session.compiled:
            return False
        if not self._stack_is_free() or any(isinstance(m, nn.MultiheadAttention) and not m.training for m in self.session.registry.modules()):
            self.session.about_self("trace-skipped", "another function mode is active, or attention is in evaluation mode")
            return False
        self._clear()
        self.why, self.first_step, self.thread = why, self.session.step, threading.get_ident()
        self.__enter__()
        self.armed = True
        self._warn = warnings.warn
        warnings.warn = levelled(self._warn)
        return True

    @staticmethod
    def _stack_is_free() -> bool:
        depth = torch._C._len_torch_function_stack()
        if depth == 0:
            return True
        from torch.utils._device import DeviceContext
        return depth == 1 and isinstance(torch._C._get_function_stack_at(0), DeviceContext)

    def disarm(self) -> dict[str, Any] | None:
        """Stop and return the trace; ``None`` when it cannot be stopped here (another mode lies on top) or is empty."""
        if not self.armed or threading.get_ident() != self.thread:
            return None
        depth = torch._C._len_torch_function_stack()
        if depth == 0 or torch._C._get_function_stack_at(depth - 1) is not self:
            self.truncated = True
            return None
        self.__exit__(None, None, None)
        self.armed = False
        warnings.warn = self._warn
        if not self.ops:
            return None
        trace = {"index": self.count, "why": self.why, "first_step": self.first_step, "last_step": self.session.step,
                 "truncated": self.truncated, "files": list(self.files), "tensors": self.tensors, "ops": self.ops}
        self.count += 1
        self.ops, self.tensors, self._tids = [], [], {}
        return trace

    # -- recording ---------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused or self.truncated or in_functorch() is not None:
            return func(*args, **(kwargs or {}))
        if getattr(getattr(func, "__code__", None), "co_filename", None) == FRAME:
            func = func.__wrapped__  # our own wrapper, looked up by torch's dispatcher: it has been entered once already
        try:
            name = self._names[func]
        except KeyError:
            name = self._names[func] = plain_name(func)
        except TypeError:
            name = plain_name(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        start = perf_counter()
        ins: list[int] | None = None
        try:
            ins = [self.tid(t, old=True) for t in tensors_in(args) + (tensors_in(kwargs.values()) if kwargs else [])]
        except Exception:
            self.session.guard.failed("trace")
        spent = perf_counter() - start
        out = func(*args, **(kwargs or {}))
        if ins is not None:
            start = perf_counter()
            try:
                self.record(name, ins, args, kwargs or {}, out)
            except Exception:
                self.session.guard.failed("trace")
                self.truncated = True
            spent += perf_counter() - start
        self.spent += spent
        self.session.own += spent
        if self.locate:
            self.ops.clear()
            try:
                self._check(name, args, kwargs or {}, out)
            except Exception:
                self.session.guard.failed("locate")
            return out
        if self.spent > MAX_SECONDS or len(self.ops) > MAX_OPS:
            self.truncated = True
        return out

    def tid(self, tensor: torch.Tensor, old: bool) -> int:
        entry = self._tids.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        flags = OLD if old else 0
        if tensor.requires_grad:
            flags |= REQUIRES_GRAD
            if tensor.is_leaf:
                flags |= LEAF
            elif old:
                flags |= STALE_GRAPH
        uid = self.session.registry.known_uid(tensor)
        if isinstance(tensor, nn.Parameter):
            flags |= PARAMETER
            uid = self.session.registry.uid(tensor)
        base = tensor._base if tensor._is_view() else None
        number = len(self.tensors)
        self.tensors.append([list(tensor.shape), str(tensor.dtype).removeprefix("torch."), flags, number, uid])
        self._tids[id(tensor)] = (weakref.ref(tensor), number)
        if base is not None and base is not tensor:
            self.tensors[number][3] = self.tensors[self.tid(base, old=old)][3]
        return number

    def record(self, name: str, ins: list[int], args: Any, kwargs: dict[str, Any], out: Any) -> None:
        outs = [self.tid(t, old=False) for t in tensors_in((out,))]
        if name == "setitem_" and ins:
            outs = [ins[0]]
        elif "out" in kwargs and ins:
            outs = outs or [ins[-1]]
        for tensor in tensors_in((out,)):
            node = grad_fn(tensor)
            if node is not None:
                self.node_ops.append((node._sequence_nr(), len(self.ops)))
        named = dict(zip(POSITIONAL.get(name, ()), args, strict=False))
        named.update(kwargs)
        kw: dict[str, Any] = {k: v for k, v in named.items() if isinstance(k, str) and (v is None or isinstance(v, bool | int | float | str))}
        kw.update({k: list(v) for k, v in named.items() if isinstance(k, str) and isinstance(v, tuple | list) and v
                   and all(isinstance(x, int) for x in v)})
        if name == "dropout" and "training" not in named:
            kw["training_default"] = True
        op: dict[str, Any] = {"op": name, "m": self.stack[-1] if self.stack else -1, "in": ins, "out": outs, "s": self.session.step}
        if kw:
            op["kw"] = kw
        if not torch.is_grad_enabled():
            op["g"] = 0
        values = seen_figures(name, args, kwargs)
        if any(self.tensors[t][1] == "float16" for t in (*outs, *ins)):
            self.session.half = True
            values = {**values, **seen_halves(name, args, kwargs, out)}
        if values:
            op["v"] = values
        self._lines(op, sys._getframe(2))
        self.ops.append(op)

    def _check(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """In a run armed to locate: is this the first operation that made a non-finite value of finite ones? An infinity
        that is written on purpose (a mask) is none."""
        from osler.watch.nonfinite import operand
        from osler.watch.where import user_line

        made = [operand(t) for t in tensors_in((out,))]
        if not any(f is not None and (f["nan"] or (f["nonfinite"] and name not in MASKS)) for f in made):
            return
        given = [operand(t) for t in tensors_in(args) + tensors_in(kwargs.values())]
        inputs = [f for f in given if f is not None]
        if any(f["nan"] for f in inputs) or (any(f["nonfinite"] for f in inputs) and name not in ("softmax", "log_softmax")):
            if self.session.registry is not None and any(f["nan"] for f in inputs) and name not in ("getitem", "isnan", "isfinite", "nan_to_num"):
                kind = "input"
            else:
                return
        else:
            kind = BIRTHS.get(name, "unknown")
        self.locate = False
        self.truncated = True
        self.session.fact("nonfinite", user_line(), what="loss", value="nan" if any(f and f["nan"] for f in made) else "inf", before_step=True, op=name,
                          op_kind=kind, operand=inputs[-1] if inputs else None, line_by="re-run", parameters=[], module=self.stack[-1] if self.stack else None)

    def event(self, name: str, ins: Iterable[torch.Tensor] = (), outs: Iterable[torch.Tensor] = (), **kw: Any) -> None:
        """A pseudo-operation of the loop: ``@backward``, ``@step``, ``@batch``."""
        if not self.armed or self.truncated:
            return
        op: dict[str, Any] = {"op": name, "m": -1, "in": [self.tid(t, True) for t in ins], "out": [self.tid(t, True) for t in outs],
                              "s": self.session.step, "kw": kw}
        self._lines(op, sys._getframe(1))
        self.ops.append(op)

    def _lines(self, op: dict[str, Any], frame: FrameType | None) -> None:
        found: list[list[Any]] = []
        while frame is not None and len(found) < 7:
            code = frame.f_code
            if is_user(code):
                file = shorten(code.co_filename)
                number = self.files.setdefault(file, len(self.files))
                found.append([number, frame.f_lineno, code.co_name])
                self.session.keep_source(file)
            frame = frame.f_back
        if found:
            op["at"] = found[0]
            if len(found) > 1:
                op["up"] = found[1:]
