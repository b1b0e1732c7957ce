"""Last lines of every script here: what a watcher must not have changed."""
import hashlib
import os
import random

import numpy as np
import torch


def digest(*tensors):
    h = hashlib.sha256()
    for t in tensors:
        t = t.detach().to_dense() if t.is_sparse else t.detach()
        h.update(str((t.dtype, tuple(t.shape))).encode())
        h.update(torch.view_as_real(t).contiguous().numpy().tobytes() if t.is_complex()
                 else t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
    return h.hexdigest()


def show(*modules):
    print("parameters", digest(*[t for m in modules for t in m.state_dict().values()]))
    print("torch rng", digest(torch.get_rng_state()))
    kind, keys, *rest = np.random.get_state()
    print("numpy rng", hashlib.sha256(keys.tobytes() + repr((kind, rest)).encode()).hexdigest())
    print("python rng", hashlib.sha256(repr(random.getstate()).encode()).hexdigest())


def graphs(counters):
    """Graphs must be equal; breaks may be fewer when watched, so they go to a file that the test compares."""
    print("graphs", counters["stats"]["unique_graphs"])
    with open("graph-breaks.txt", "a") as out:
        print("watched" if "OSLER_RUN" in os.environ else "alone", sum(counters["graph_break"].values()), file=out)


def seed(value=0):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
