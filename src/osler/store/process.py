"""How the writer's thread stays out of the way of the process it lives in: forks and signals."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from typing import Protocol

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGCONT", "SIGWINCH")


class Forkable(Protocol):
    def before_fork(self) -> None: ...

    def after_fork_in_parent(self) -> None: ...

    def become_inert(self) -> None: ...


def follow_forks(target: Forkable) -> None:
    """Call the target around every ``os.fork`` for as long as it lives.

    The thread is stopped for the moment of the fork: a fork beside a running thread draws a warning of Python 3.12 and
    later, and could copy a lock that the thread holds.
    """
    if not hasattr(os, "register_at_fork"):
        return
    ref = weakref.ref(target)

    def before() -> None:
        living = ref()
        if living is not None:
            living.before_fork()

    def in_parent() -> None:
        living = ref()
        if living is not None and not sys.is_finalizing():
            living.after_fork_in_parent()

    def in_child() -> None:
        living = ref()
        if living is not None:
            living.become_inert()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def leave_signals_alone() -> None:
    """Block signals in the calling thread.

    A script may block a signal in its own threads and ``sigwait`` for it; it must not be delivered here instead.
    """
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)})
