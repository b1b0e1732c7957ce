"""Which operation made a value non-finite: read from the saved tensors of the loss's graph before backward frees them.

Source: handbook A23. Anomaly mode is no substitute: it misses a forward NaN whose backward is finite.
"""

from __future__ import annotations

from typing import Any

import torch

from osler.watch.graph import Walk
from osler.watch.readout import on_cpu, scalar

LOGS = frozenset(("LogBackward0", "Log2Backward0", "Log10Backward0", "Log1PBackward0"))
RISKY = LOGS | frozenset(("SqrtBackward0", "RsqrtBackward0", "PowBackward0", "PowBackward1", "DivBackward0", "ReciprocalBackward0", "LinalgVectorNormBackward0",
                          "NormBackward0", "NormBackward1", "AcosBackward0", "AsinBackward0", "AcoshBackward0", "AtanhBackward0", "ExpBackward0", "StdBackward0",
                          "CdistBackward0", "XlogyBackward0"))
"""Operations that can make an infinite or undefined value or derivative of finite inputs."""


def operand(tensor: Any) -> dict[str, Any] | None:
    """Range of a saved tensor; ``None`` if there is none on the CPU."""
    if not isinstance(tensor, torch.Tensor) or not on_cpu(tensor) or tensor.numel() == 0 or not tensor.is_floating_point():
        return None
    values = tensor.detach()
    finite = torch.isfinite(values)
    good = values[finite]
    return {"min": scalar(good.min()) if good.numel() else None, "max": scalar(good.max()) if good.numel() else None,
            "zeros": int(scalar((values == 0).sum())), "negative": int(scalar((values < 0).sum())),
            "nonfinite": int(values.numel() - scalar(finite.sum())), "nan": int(scalar(values.isnan().sum())), "shape": list(values.shape),
            "numel": int(values.numel()), "dtype": str(values.dtype).removeprefix("torch.")}


def saved(node: Any, name: str) -> dict[str, Any] | None:
    try:
        return operand(getattr(node, "_saved_" + name))
    except (RuntimeError, AttributeError):
        return None


def divisor(node: Any) -> dict[str, Any] | None:
    """What a quotient divided by; a count may be of an integer type."""
    try:
        other = node._saved_other
    except (RuntimeError, AttributeError):
        return None
    return operand(other.detach().double() if isinstance(other, torch.Tensor) and not other.is_floating_point() and not other.is_complex() else other)


MEANS = ("MeanBackward0", "MeanBackward1", "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyWithLogitsBackward0",
         "BinaryCrossEntropyBackward0", "NllLossBackward0", "NllLoss2DBackward0")


def empty_mean(name: str, node: Any) -> dict[str, Any] | None:
    """Figures of a mean over nothing: an empty selection, or targets all of which are ignored."""
    try:
        if name.startswith("Mean"):
            shape, n = tuple(int(d) for d in node._saved_self_sym_sizes), int(node._saved_self_sym_numel)
        elif node._saved_reduction != 1:
            return None
        else:
            shape, n = tuple(node._saved_self.shape), node._saved_self.numel()
            if name.startswith("Nll") and on_cpu(node._saved_total_weight):
                n = int(scalar((node._saved_total_weight != 0).sum()))
    except (RuntimeError, AttributeError):
        return None
    return {"min": 0.0, "max": 0.0, "zeros": 1, "negative": 0, "nonfinite": 0, "nan": 0, "shape": list(shape), "numel": 1, "dtype": "float32", "empty": True} if n == 0 else None


def births(name: str, node: Any) -> tuple[str, dict[str, Any]] | None:
    """Whether this node made a non-finite *output* of finite inputs: (kind, figures of the guilty operand)."""
    own = saved(node, "self")
    result = saved(node, "result")
    if own is not None and own["nonfinite"]:
        return None
    if name in MEANS and (nothing := empty_mean(name, node)) is not None:
        return "division-by-zero", nothing
    if name in LOGS and own is not None and (own["zeros"] or own["negative"]):
        return ("log-of-zero" if own["zeros"] else "log-of-negative"), own
    if name == "DivBackward0":
        other = divisor(node)
        if other is not None and other["zeros"] and not other["nonfinite"]:
            return "division-by-zero", other
    if name in ("ReciprocalBackward0", "RsqrtBackward0") and result is not None and result["nonfinite"]:
        return "division-by-zero", result
    if name == "SqrtBackward0" and result is not None and result["nan"]:
        return "sqrt-of-negative", result
    if name in ("PowBackward0", "PowBackward1") and own is not None:
        exponent = getattr(node, "_saved_exponent", None)
        power = float(exponent) if isinstance(exponent, int | float) else None
        if power is not None and ((power < 0 and own["zeros"]) or (power != int(power) and own["negative"])):
            return ("division-by-zero" if power < 0 else "pow-of-negative"), own
    if name == "ExpBackward0" and result is not None and result["nonfinite"]:
        return "exp-overflow", result
    if name in ("SoftmaxBackward0", "LogSoftmaxBackward0") and result is not None and result["nan"]:
        return ("softmax-of-masked-row" if masked(node) else "softmax-of-infinite"), result
    if name in ("XlogyBackward0",):
        other = saved(node, "other")
        if other is not None and other["zeros"]:
            return "log-of-zero", other
    if name in ("LogitBackward0", "AtanhBackward0", "AcosBackward0", "AsinBackward0") and own is not None and max(abs(own["min"] or 0), abs(own["max"] or 0)) >= 1:
        return "domain-error", own
    return None


def masked(node: Any, depth: int = 5) -> bool:
    """Whether the scores that enter a softmax come from a mask (filled, selected or added) a few operations before."""
    for _ in range(depth):
        following = [child for child, _ in node.next_functions if child is not None]
        if not following:
            return False
        node = following[0]
        if type(node).__name__ in ("MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0", "AddBackward0"):
            return True
    return False


def singular(name: str, node: Any) -> tuple[str, dict[str, Any]] | None:
    """Whether this node's *derivative* is infinite or undefined although its output may be finite."""
    own, result = saved(node, "self"), saved(node, "result")
    if name == "SqrtBackward0" and result is not None and result["zeros"]:
        return "sqrt-of-zero", result
    if name in ("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "StdBackward0") and result is not None and result["zeros"]:
        return "norm-of-zero", result
    if name in LOGS and own is not None and own["zeros"]:
        return "log-of-zero", own
    if name in ("PowBackward0", "PowBackward1") and own is not None and own["zeros"]:
        exponent = getattr(node, "_saved_exponent", None)
        if isinstance(exponent, int | float) and exponent < 1 and exponent != 0:
            return "pow-of-zero", own
        if exponent is not None and not isinstance(exponent, int | float):
            return "pow-of-zero", own
    if name == "DivBackward0":
        other = divisor(node)
        if other is not None and other["zeros"]:
            return "division-by-zero", other
    if name in ("AcosBackward0", "AsinBackward0", "AtanhBackward0") and own is not None and max(abs(own["min"] or 0), abs(own["max"] or 0)) >= 1:
        return "domain-edge", own
    if name == "ExpBackward0" and result is not None and result["nonfinite"]:
        return "exp-overflow", result
    return None


def suspect(name: str, node: Any) -> bool:
    """A quick look at one node's saved tensor: could its derivative be infinite or undefined here?"""
    field = QUICK.get(name)
    if field is None:
        return False
    try:
        tensor = getattr(node, "_saved_" + field)
    except (RuntimeError, AttributeError):
        return False
    if not isinstance(tensor, torch.Tensor) or not on_cpu(tensor) or tensor.numel() == 0:
        return False
    if name in ("AcosBackward0", "AsinBackward0", "AtanhBackward0"):
        return scalar(tensor.detach().abs().max()) >= 1
    return not scalar(tensor.detach().all())


QUICK = {**dict.fromkeys(LOGS, "self"), "SqrtBackward0": "result", "LinalgVectorNormBackward0": "result", "NormBackward0": "result", "NormBackward1": "result",
         "StdBackward0": "result", "PowBackward0": "self", "PowBackward1": "self", "DivBackward0": "other", "AcosBackward0": "self", "AsinBackward0": "self",
         "AtanhBackward0": "self"}
LIKELIEST = ("SqrtBackward0", "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "StdBackward0", "LogBackward0", "DivBackward0", "AcosBackward0")

INPUT_FIELDS = ("self", "mat1", "input", "mat2", "other", "indices", "weight", "x")


def entered(walked: Walk) -> tuple[int, dict[str, Any]] | None:
    """First node in execution order whose saved input is non-finite: the value came from before this graph (data, a
    parameter) unless an earlier node made it."""
    for index in execution_order(walked):
        node, name = walked.nodes[index], walked.names[index]
        if name.endswith("AccumulateGrad"):
            continue
        for field in INPUT_FIELDS:
            found = saved(node, field)
            if found is not None and found["nonfinite"]:
                found["field"] = field
                return index, found
    return None


def execution_order(walked: Walk) -> list[int]:
    """Node indices in the order in which their operations ran (AccumulateGrad nodes last)."""
    def number(index: int) -> int:
        try:
            nr = int(walked.nodes[index]._sequence_nr())
            return nr if nr < 1 << 62 else 1 << 62
        except Exception:
            return 1 << 62
    return sorted(range(len(walked.nodes)), key=number)


def locate(walked: Walk) -> tuple[int, str, dict[str, Any]] | None:
    """First birth in execution order: (node index, kind, operand figures)."""
    for index in execution_order(walked):
        found = births(walked.names[index], walked.nodes[index])
        if found is not None:
            return index, found[0], found[1]
    return None


def risks(walked: Walk) -> list[int]:
    """Indices of nodes whose derivative can be singular (a power of one or more is not)."""
    found = []
    for index, name in enumerate(walked.names):
        if name in RISKY:
            exponent = getattr(walked.nodes[index], "_saved_exponent", None) if name == "PowBackward0" else None
            if not (isinstance(exponent, int | float) and exponent >= 1):
                found.append(index)
    return found
