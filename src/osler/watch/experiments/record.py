"""Records the operations of a pass with their code lines and modules, and finds the first one that behaves differently in two passes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from osler.core.facts import Location
from osler.watch.experiments.nested import leaves
from osler.watch.experiments.readings import FREE, MIXED
from osler.watch.experiments.subject import Subject
from osler.watch.where import is_user, locate

MAX_OPS = 20_000
MAX_BYTES = 512 << 20
GETTERS = ("T", "mT", "H", "mH", "data", "real", "imag")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.TransformerEncoder, nn.TransformerDecoder)
KINDS = {
    "softmax": ("softmax", "log_softmax", "softmin", "gumbel_softmax"),
    "attention": ("scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention"),
    "rnn": ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
    "batch_norm": ("batch_norm", "instance_norm", "native_batch_norm"),
    "norm": ("layer_norm", "group_norm", "rms_norm", "normalize", "norm", "vector_norm"),
    "mean": ("mean", "sum", "std", "var", "var_mean", "std_mean", "max", "min", "amax", "amin", "logsumexp", "median", "cumsum", "prod", "quantile"),
    "reshape": ("reshape", "view", "flatten", "transpose", "permute", "unflatten", "swapaxes", "movedim", "T", "t", "mT", "stack", "cat"),
    "matmul": ("matmul", "bmm", "mm", "einsum", "linear", "bilinear", "baddbmm", "cdist", "tensordot"),
    "conv": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "unfold"),
    "order": ("roll", "flip", "sort", "argsort", "gather", "topk", "index_select", "getitem"),
    "dropout": ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "bernoulli",
                "bernoulli_"),
    "random": ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_", "randperm", "multinomial",
               "exponential_", "random_", "rrelu", "_sample_dirichlet", "poisson"),
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


@dataclass(slots=True)
class Op:
    """One operation: copies of its outputs (written operands included), and who made its inputs."""

    name: str
    at: Location | None
    lib: str | None
    building: bool
    modules: tuple[nn.Module, ...]
    outs: list[torch.Tensor]
    made_by: tuple[int, ...]
    kw: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "built in forward" if self.building else KIND_OF.get(self.name.removesuffix("_"), KIND_OF.get(self.name, "other"))


class Recorder(TorchFunctionMode):  # type: ignore[misc]
    """A function mode that keeps what every operation gave. ``writes_to`` are storages whose writers are of interest."""

    def __init__(self, writes_to: Sequence[int] = ()) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.writers: list[Op] = []
        self._storages = frozenset(writes_to)
        self._stack: list[nn.Module] = []
        self._alive: list[Any] = []
        self._makers: dict[int, int] = {}
        self._bytes = 0
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        self._handles = [hooks.register_module_forward_pre_hook(lambda m, _: self._stack.append(m)),
                         hooks.register_module_forward_hook(lambda m, *_: self._leave(m), always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        for handle in self._handles:
            handle.remove()

    def _leave(self, module: nn.Module) -> None:
        if module in self._stack:
            del self._stack[len(self._stack) - 1 - self._stack[::-1].index(module):]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = plain_name(func)
        if name is None or len(self.ops) >= MAX_OPS or self._bytes > MAX_BYTES:
            return func(*args, **kwargs)
        written = [t for _, t in leaves((args[:1], kwargs.get("out")))] if name.endswith("_") or "out" in kwargs or kwargs.get("inplace") else []
        watched = [(t, t._version) for _, t in leaves(args) if self._storages and t.untyped_storage().data_ptr() in self._storages]
        result = func(*args, **kwargs)
        given = [t for _, t in leaves((args, kwargs))]
        outs = [t for _, t in leaves((result, written))]
        if not outs:
            return result
        at, lib, building = _line(sys._getframe(1))
        index = len(self.ops)
        made_by = tuple(sorted({self._makers[id(t)] for t in given if id(t) in self._makers}))
        simple = {k: v for k, v in kwargs.items() if isinstance(v, bool | int | float | str)}
        op = Op(name, at, lib, building, tuple(self._stack), [t.detach().clone() for t in outs], made_by, simple)
        self.ops.append(op)
        self._alive.append((result, given))
        self._makers.update((id(t), index) for t in outs)
        self._bytes += sum(t.numel() * t.element_size() for t in op.outs)
        if any(t._version != version for t, version in watched):
            self.writers.append(op)
        return result


def plain_name(func: Any) -> str | None:
    name: str | None = getattr(func, "__name__", None)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        return name if name in GETTERS else None
    if name in (None, "__set__", "detach", "size", "__len__", "__repr__", "__hash__", "__format__"):
        return None
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        return f"{plain[1:] if plain in INPLACE else plain}_" if plain in INPLACE or plain == "setitem" else plain
    return name


INPLACE = ("iadd", "isub", "imul", "itruediv", "idiv", "ipow", "ifloordiv", "imod", "iand", "ior", "ixor", "ilshift", "irshift")


def _line(frame: FrameType | None) -> tuple[Location | None, str | None, bool]:
    """Innermost user line below the experiment's own call, innermost library line that is not torch's, and whether a module was being built."""
    lib, building = None, False
    while frame is not None and frame.f_code is not Subject.run.__code__:
        code = frame.f_code
        if is_user(code):
            # A user's reset_parameters or __init__ of a module is construction too, wherever forward stands.
            return locate(frame), lib, building or _builds(frame)
        building = building or _builds(frame)
        if lib is None and "site-packages" in code.co_filename and "/torch/" not in code.co_filename:
            lib = f"{code.co_filename.split('site-packages/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return None, lib, building


def _builds(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("reset_parameters", "__init__", "_reset_parameters") and isinstance(frame.f_locals.get("self"), nn.Module)


def first(before: Sequence[Op], after: Sequence[Op], judge: Callable[[torch.Tensor, torch.Tensor], str]) -> Op | None:
    """The first operation that ``judge`` calls mixed; or where it only took up a statistic without samples, that one's origin."""
    states: list[str] = []
    for index, (a, b) in enumerate(zip(before, after, strict=False)):
        if a.name != b.name or len(a.outs) != len(b.outs):
            return b
        found = [judge(x, y) for x, y in zip(a.outs, b.outs, strict=True)]
        states.append(next((s for s in (MIXED, FREE) if s in found), "fine"))
        if MIXED in found:
            return _origin(after, states, index)
    return None


def _origin(ops: Sequence[Op], states: list[str], index: int) -> Op:
    """Back through values that cannot be read (a scalar, an attention matrix): a softmax among them, else the earliest."""
    chain, queue = {index}, [index]
    while queue:
        for earlier in ops[queue.pop()].made_by:
            if earlier not in chain and states[earlier] == FREE:
                chain.add(earlier)
                queue.append(earlier)
    softmax = [i for i in chain if ops[i].kind == "softmax"]
    return ops[max(softmax)] if softmax else ops[min(chain)]


def describe(op: Op | None, subject: Subject) -> dict[str, Any]:
    """``first_op``, ``kind``, ``first_module``, ``first_class``, ``module_at`` and ``at`` of an operation."""
    if op is None:
        return {"first_op": None, "kind": None, "first_module": None, "first_class": None, "module_at": None, "at": None}
    module, outer = owner(op.modules)
    built = next((at for m in outer if (at := subject.capture.built_at(m)) is not None), None)
    row = {"first_op": op.name, "kind": op.kind, "first_module": subject.capture.names.get(id(module)) if module is not None else None,
           "first_class": type(module).__name__ if module is not None else None,
           "module_at": built.to_json() if built else None, "at": op.at.to_json() if op.at else None}
    if op.at is None and op.lib is not None:
        row["lib"] = op.lib
    return row


def owner(stack: Sequence[nn.Module]) -> tuple[nn.Module | None, list[nn.Module]]:
    """The module to name: the outermost of torch's own layers around the operation (a TransformerEncoderLayer, not the Linear
    in it), else the innermost module; and where to look for a construction line, from there outwards."""
    layers = []
    for module in reversed(stack):
        if not type(module).__module__.startswith("torch.nn"):
            break
        layers.append(module)
    solid = [m for m in layers if not isinstance(m, CONTAINERS)]
    if not solid:
        return (stack[-1], [stack[-1]]) if stack else (None, [])
    chosen = solid[-1]
    return chosen, layers[layers.index(chosen):]
