"""Every recorded stream, declared once: name, row type, meaning and unit of each column.

A stream is a sequence of fixed-size rows (numpy structured dtype). ``step`` counts completed optimizer steps over all
optimizers of the process; rows are appended in time order. A value that was not measured is NaN (floats) or -1 (indices).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCHEMA = 1
"""Version of the store; readers keep this one and the one before."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    dtype: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of row. ``pyramid`` names the columns kept as min/max/mean bands at coarser levels."""

    name: str
    columns: tuple[Column, ...]
    pyramid: tuple[str, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        return np.dtype([(c.name, c.dtype) for c in self.columns])


C = Column
STEPS = Stream("steps", (
    C("step", "<i8", "1", "optimizer steps completed, counted over all optimizers, this one included"),
    C("t", "<f8", "s", "time since the watcher was attached, at the end of the step (between the neighbours' where a step was only counted)"),
    C("optimizer", "<i2", "index", "which optimizer stepped (order of construction)"),
    C("backwards", "<u2", "1", "backward passes since the previous step"),
    C("loss", "<f4", "loss", "value that the last backward started from"),
    C("lr", "<f4", "1/step", "learning rate of the first parameter group, as used in this step"),
    C("grad_norm", "<f4", "loss/weight", "L2 norm over all gradients of this optimizer, before the step"),
    C("step_time", "<f4", "s", "time since the previous step ended"),
    C("data_wait", "<f4", "s", "time spent inside DataLoader iteration since the previous step"),
    C("own_time", "<f4", "s", "time osler itself spent since the previous step"),
), pyramid=("loss", "lr", "grad_norm", "step_time", "data_wait", "own_time"))

CALLS = Stream("calls", (
    C("step", "<i8", "1", "steps completed before this call"),
    C("t", "<f8", "s", "time of the call"),
    C("criterion", "<i2", "index", "which criterion fact (order of first use)"),
    C("phase", "<u1", "0 train, 1 validation", "grad mode at the call"),
    C("batch", "<i4", "rows", "rows of the first dimension"),
    C("value", "<f4", "loss", "returned value (NaN if it has more than one element)"),
    C("accuracy", "<f4", "1", "share of argmax equal to an integer target, where that is defined"),
), pyramid=("value", "accuracy"))

LAYERS = Stream("layers", (
    C("step", "<i8", "1", "the step these values belong to"),
    C("param", "<i4", "uid", "parameter uid, see the fact `params`"),
    C("grad_norm", "<f4", "loss/weight", "L2 norm of the gradient before the step"),
    C("weight_norm", "<f4", "weight", "L2 norm of the weights before the step"),
    C("update_norm", "<f4", "weight", "L2 norm of the change made by the step"),
    C("descent", "<f4", "loss", "-(gradient . change): first-order fall of the loss that this step buys"),
    C("zero_share", "<f4", "1", "share of gradient elements that are exactly zero"),
))

ACTIVATIONS = Stream("activations", (
    C("step", "<i8", "1", "steps completed before this forward pass"),
    C("module", "<i4", "id", "module id, see the fact `modules`"),
    C("mean", "<f4", "value", "mean of the output"),
    C("std", "<f4", "value", "standard deviation of the output"),
    C("zero_share", "<f4", "1", "share of output elements that are exactly zero"),
    C("dead_share", "<f4", "1", "share of units that are zero for every sample of the batch"),
    C("saturated_share", "<f4", "1", "share of elements within 1 % of the bounds of a sigmoid or tanh"),
    C("row_spread", "<f4", "1", "std over the batch divided by the overall std (0: all samples get the same output)"),
))

BATCHES = Stream("batches", (
    C("step", "<i8", "1", "steps completed when the batch was served"),
    C("t", "<f8", "s", "time it was served"),
    C("loader", "<i2", "index", "which loader fact (order of construction)"),
    C("phase", "<u1", "0 train, 1 validation", "grad mode when it was served"),
    C("pass_", "<i4", "1", "which pass over this loader"),
    C("size", "<i4", "rows", "rows of the batch"),
    C("wait", "<f4", "s", "time waited for it"),
    C("mean", "<f4", "value", "mean of the first floating tensor"),
    C("std", "<f4", "value", "standard deviation of the first floating tensor"),
    C("label_entropy", "<f4", "nat", "entropy of the integer labels in the batch"),
    C("classes", "<i4", "1", "distinct integer labels in the batch"),
))

ROWS = Stream("rows", (
    C("loader", "<i2", "index", "which loader served the row"),
    C("phase", "<u1", "0 train, 1 validation", "grad mode when it was served"),
    C("pass_", "<i4", "1", "which pass over this loader"),
    C("position", "<i4", "1", "position of the row within its pass"),
    C("label", "<i4", "1", "integer label, -1 if none"),
    C("hash", "<u8", "hash", "fingerprint of the row's input values"),
))

STREAMS: dict[str, Stream] = {s.name: s for s in (STEPS, CALLS, LAYERS, ACTIVATIONS, BATCHES, ROWS)}
