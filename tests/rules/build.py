"""Short ways to write windows, facts, streams and traces in the pages of ``tests/rules``.

In scope of every page as ``build``::

    window = build.window(
        facts=[build.fact("modules", at=12, roots=[...], modules=[...])],
        steps=build.steps(40, loss=1.5, lr=1e-3),
        traces=[build.trace('''
            h[32,10] = linear(x[32,64], w[10,64]p1)     @14<31 m2
            loss[]   = cross_entropy(h, y[32]:int64)    @31
            @backward(loss)                             @32
            @step()                                     @33
        ''')],
        source="import torch\\n...",
    )

Nothing here touches torch.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np

from osler.core.facts import Fact, Location
from osler.core.finding import Finding, NotChecked
from osler.core.signals import STREAMS
from osler.core.trace import CUTS, LEAF, OLD, PARAMETER, REQUIRES_GRAD, STALE_GRAPH, VIEWS, Op, TensorInfo, Trace
from osler.core.window import End, Window

FILE = "train.py"
COPIES = {"clone", "to", "float", "double", "half", "bfloat16", "long", "int", "bool", "index_select"}


def place(at: Any) -> Location | None:
    """``12``, ``("train.py", 12)``, ``("model.py", 12, "forward")``, a ``Location`` or ``None``."""
    if at is None or isinstance(at, Location):
        return at
    if isinstance(at, int):
        return Location(FILE, at)
    return Location(*at)


def fact(kind: str, /, step: int = 0, at: Any = None, t: float = 0.0, lib: str | None = None, **data: Any) -> Fact:
    return Fact(kind, step, t, place(at), data, lib)


def rows(stream: str, n: int | None = None, **columns: Any) -> np.ndarray:
    """``n`` rows of a declared stream; columns not given are NaN (floats), -1 (signed) or 0 (unsigned)."""
    dtype = STREAMS[stream].dtype
    if n is None:
        n = max((np.size(v) for v in columns.values()), default=0)
    out = np.zeros(n, dtype)
    for name in dtype.names:
        kind = dtype[name].kind
        out[name] = columns.get(name, np.nan if kind == "f" else -1 if kind == "i" else 0)
    unknown = set(columns) - set(dtype.names)
    if unknown:
        raise ValueError(f"stream {stream} has no column {sorted(unknown)}; it has {dtype.names}")
    return out


def steps(n: int, **columns: Any) -> np.ndarray:
    """``n`` optimizer steps, numbered from 1, one backward each, optimizer 0."""
    return rows("steps", n, **{"step": np.arange(1, n + 1), "t": np.arange(n) * 0.01, "optimizer": 0, "backwards": 1,
                               "step_time": 0.01, **columns})


def window(facts: Any = (), steps: np.ndarray | None = None, traces: Any = (), ended: Any = True, source: Any = None,
           run: Any = None, rank: int = 0, **streams: np.ndarray) -> Window:
    """``source`` is the text of train.py or a dict of files; ``ended`` is True, False or an ``End``; further streams by name."""
    sources = {} if source is None else source if isinstance(source, dict) else {FILE: source}
    if steps is not None:
        streams["steps"] = steps
    end = ended if isinstance(ended, End) else End(0) if ended else None
    return Window(run or {}, streams, list(facts), list(traces), {k: textwrap.dedent(v).lstrip("\n") for k, v in sources.items()},
                  end, rank)


def end(code: int | None = 0, signal: str | None = None, out_of_memory: bool = False) -> End:
    return End(code, signal, None, out_of_memory)


OP = re.compile(r"^(?:(?P<outs>[^=(]+?)\s*=\s*)?(?P<name>[@\w]+)\((?P<args>[^()]*(?:\([^()]*\)[^()]*)*)\)(?P<rest>.*)$")
TENSOR = re.compile(r"^(?P<name>[A-Za-z_]\w*)(?:\[(?P<shape>[\d,\s]*)\])?(?P<flags>(?:p\d+|g|n|s|o|l)*)(?::(?P<dtype>\w+))?$")


def trace(text: str, *, first_step: int = 0, truncated: bool = False, index: int = 0, why: str = "start") -> Trace:
    """A trace from one operation a line: ``out[shape]flags = name(in[shape]flags:dtype, key=value) @line<caller m2 nograd {k=v}``.

    Shapes and flags are written at a tensor's first mention. Flags: ``p5`` parameter with uid 5, ``g`` requires grad, ``n`` does
    not, ``s`` carries a graph from before the trace, ``o`` existed before the trace, ``l`` leaf. A tensor first seen as an input
    is old; an output requires grad when an input does, grad mode is on and the operation is not one of ``CUTS``. A name given
    again as output is a new tensor unless the operation ends in ``_`` (in place). ``@step()`` counts the step up.
    """
    tensors: list[TensorInfo] = []
    names: dict[str, int] = {}
    ops: list[Op] = []
    step = first_step

    def declare(name: str, shape: Any, flags: int, dtype: str | None, storage: int, uid: int = -1) -> int:
        dims = tuple(int(d) for d in (shape or "").replace(" ", "").split(",") if d)
        tensors.append(TensorInfo(dims, dtype or "float32", flags, storage if storage >= 0 else len(tensors), uid))
        names[name] = len(tensors) - 1
        return len(tensors) - 1

    for raw in textwrap.dedent(text).strip().splitlines():
        line = raw.split("#")[0].strip()
        if not line:
            continue
        found = OP.match(line)
        if found is None:
            raise ValueError(f"not an operation: {line!r}")
        name, rest = found["name"], found["rest"]
        grad = not re.search(r"\bnograd\b", rest)
        ins, kw = [], {}
        for item in split_args(found["args"]):
            key, eq, value = item.partition("=")
            if eq:
                kw[key.strip()] = literal(value.strip())
                continue
            spec = TENSOR.match(item)
            if spec is None:
                kw.setdefault("args", []).append(literal(item))
                continue
            if spec["name"] not in names:
                marks = spec["flags"] or ""
                uid = re.search(r"p(\d+)", marks)
                flags = OLD | (REQUIRES_GRAD if (uid and "n" not in marks) or "g" in marks or "s" in marks else 0)
                flags |= (PARAMETER | LEAF if uid else 0) | (STALE_GRAPH if "s" in marks else 0) | (LEAF if "l" in marks else 0)
                declare(spec["name"], spec["shape"], flags, spec["dtype"], -1, int(uid[1]) if uid else -1)
            ins.append(names[spec["name"]])
        outs = []
        for item in split_args(found["outs"] or ""):
            spec = TENSOR.match(item)
            if spec is None:
                raise ValueError(f"not a tensor: {item!r} in {line!r}")
            if name.endswith("_") and spec["name"] in names and names[spec["name"]] in ins:
                outs.append(names[spec["name"]])
                continue
            marks = spec["flags"] or ""
            needs = grad and name not in CUTS and any(tensors[t].requires_grad for t in ins)
            flags = REQUIRES_GRAD if ("g" in marks or needs) and "n" not in marks else 0
            shares = (name in VIEWS and name not in COPIES and bool(ins)) or name in ("detach", "data", "numpy")
            outs.append(declare(spec["name"], spec["shape"], flags, spec["dtype"], tensors[ins[0]].storage if shares and ins else -1))
        here = re.search(r"@(\S+)", rest)
        frames = [Location(*(part.rsplit(":", 1)[0], int(part.rsplit(":", 1)[1])) if ":" in part else (FILE, int(part)))
                  for part in here[1].split("<")] if here else []
        module = re.search(r"\bm(\d+)\b", rest)
        braces = re.search(r"\{(.*)\}", rest)
        values = {k.strip(): literal(v.strip()) for k, _, v in (p.partition("=") for p in split_args(braces[1]))} if braces else {}
        ops.append(Op(len(ops), name, frames[0] if frames else None, tuple(frames[1:]), int(module[1]) if module else -1,
                      tuple(ins), tuple(outs), kw, grad, step, values))
        step += name == "@step"
    return Trace(index, why, first_step, step, truncated, tuple(tensors), tuple(ops))


def split_args(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, here = [], 0, ""
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append(here)
            here = ""
        else:
            here += c
    return [p.strip() for p in [*parts, here] if p.strip()]


def literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if text.startswith(("(", "[")):
        return [literal(p) for p in split_args(text[1:-1])]
    return {"True": True, "False": False, "None": None}.get(text, text.strip("'\""))


def module(id: int, name: str, cls: str, at: Any = None, root: int = 0, direct: Any = (), library: bool = True, training: bool = True,
           **attrs: Any) -> dict[str, Any]:
    """One entry of ``modules`` in the fact of that name."""
    here = place(at)
    return {"id": id, "root": root, "name": name, "class": cls, "at": here.to_json() if here else None, "library": library,
            "training": training, "attrs": attrs, "direct": list(direct)}


def modules(*entries: dict[str, Any], roots: Any = None, step: int = 0) -> Fact:
    """The fact ``modules``; without ``roots`` the entries named "" are the roots."""
    if roots is None:
        roots = [{"id": m["id"], "class": m["class"], "at": m["at"]} for m in entries if m["name"] == ""]
    return fact("modules", step=step, roots=roots, modules=list(entries))


def param(uid: int, name: str, shape: Any = (8, 8), module: int = 0, requires_grad: bool = True, optimizer: Any = 0, loaded: bool = False,
          stepped: bool = False, default: Any = None, **init: Any) -> dict[str, Any]:
    """One entry of ``params`` in the fact of that name."""
    return {"uid": uid, "name": name, "module": module, "shape": list(shape), "dtype": "float32", "requires_grad": requires_grad,
            "leaf": True, "optimizer": optimizer, "loaded": loaded, "stepped": stepped,
            "init": {"mean": 0.0, "std": 0.1, "absmax": 0.3, "constant": False, "default": default, **init}}


def params(*entries: dict[str, Any], step: int = 0) -> Fact:
    return fact("params", step=step, params=list(entries))


def reduced(found: Finding | NotChecked) -> dict[str, Any]:
    """What a page's json block states of a finding."""
    if isinstance(found, NotChecked):
        return {"not_checked": found.rule, "why": found.why}
    return {"cause": found.cause, "certainty": found.certainty, "severity": found.severity, "line": found.where.line}
