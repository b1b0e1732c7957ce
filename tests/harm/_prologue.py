"""Imported first by copies of whole scripts: at exit prints a hash over everything an optimizer ever updated.

Keeps the optimizers' parameters alive, which no script should notice; the same in both runs.
"""
import atexit
import hashlib
import os
import random

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PID, SEEN = os.getpid(), {}


def note(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            SEEN.setdefault(id(p), p)


@atexit.register
def show():
    if os.getpid() != PID or not SEEN:
        return
    h = hashlib.sha256()
    for p in SEEN.values():
        p = p.detach()
        h.update(str((p.dtype, tuple(p.shape))).encode())
        h.update(torch.view_as_real(p).numpy().tobytes() if p.is_complex() else p.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    print("final parameters", h.hexdigest())
    print("random states", hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
          hashlib.sha256(np.random.get_state()[1].tobytes()).hexdigest(), hashlib.sha256(repr(random.getstate()).encode()).hexdigest())


register_optimizer_step_post_hook(note)
