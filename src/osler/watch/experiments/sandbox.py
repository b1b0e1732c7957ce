"""The child's first acts: what a copy of somebody's training process must not do.

It must not speak (descriptors 0 to 2 are /dev/null), not move a shared file offset (all others are closed), not write a file,
open a connection or start a process (an audit hook and a file size limit of 0), not write memory that it shares with the
real run (such mappings become read-only), not run the user's signal handlers, and not outlive its time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from typing import Any

import torch

FORBIDDEN = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.kill",
             "os.killpg", "os.fork", "os.forkpty", "os.exec", "os.system", "os.posix_spawn", "shutil.", "subprocess.", "socket.connect",
             "socket.bind", "socket.send", "sqlite3.connect", "pty.spawn", "signal.pthread_kill", "urllib.Request", "ftplib.", "smtplib.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PIPE = 3


class Forbidden(PermissionError):
    """An experiment would have changed something outside the forked copy."""


def close_in(pipe: int, seconds: float) -> int:
    """Isolates this process, which was just forked; returns the descriptor of the pipe, which was moved.

    The rest of its life is limited to ``seconds`` of wall time.
    """
    torch.set_num_threads(1)
    _signals()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    gc.disable()
    sys.dont_write_bytecode = True
    os.dup2(pipe, PIPE, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(PIPE + 1, max(256, min(os.sysconf("SC_OPEN_MAX"), 1 << 20)))
    _yield_to_training()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _freeze_shared_memory()
    sys.addaudithook(_audit)
    _torch()
    return PIPE


def _signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        try:
            if signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError, RuntimeError):
            continue
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _yield_to_training() -> None:
    """The real run comes first, for the processor and when memory runs out."""
    try:
        os.nice(5)
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, b"1000")
        os.close(descriptor)
    except OSError:
        pass


def _freeze_shared_memory() -> None:
    """A write to memory shared with the parent (workers' tensors, writable memory maps, locks) shall end this process."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, rights = line.split(None, 2)[:2]
        if rights.endswith("s") and "w" in rights:
            low, high = (int(x, 16) for x in span.split("-"))
            libc.mprotect(ctypes.c_void_p(low), ctypes.c_size_t(high - low), 1)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = (args[1], args[2]) if len(args) > 2 else (None, 0)
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool((flags or 0) & WRITING)
        if writes and args[0] != os.devnull:
            raise Forbidden(f"it writes a file ({str(args[0])[:200]})")
    elif event.startswith(FORBIDDEN):
        raise Forbidden(f"it has effects outside the process ({event})")


def _torch() -> None:
    """No foreign function mode, no autocast, reference kernels of attention, eager code."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    torch.set_autocast_enabled("cpu", False)
    torch.backends.mha.set_fastpath_enabled(False)
    for kernel in ("flash", "mem_efficient", "cudnn"):
        if (switch := getattr(torch.backends.cuda, f"enable_{kernel}_sdp", None)) is not None:
            switch(False)
    torch.backends.cuda.enable_math_sdp(True)
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        torch.compiler.set_stance("force_eager")
