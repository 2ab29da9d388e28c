"""Processes that die with their parent, also when the parent is killed with SIGKILL.

Called first thing by every process we start: the supervisor's children, the clusters' workers, the drivers.
Linux only (prctl(2) PR_SET_PDEATHSIG); elsewhere it does nothing and pipes closing must do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

_parent = 0


def die_with_parent(sig: int = signal.SIGKILL, *, forks_too: bool = False) -> None:
    """Ask the kernel for `sig` when the parent's starting thread ends; `forks_too` extends it to every later fork.

    PR_SET_PDEATHSIG is cleared in a fork, so children made by os.fork() (django-q2's) ask again for themselves.
    Who starts us may put its process id into `CYBORG_PARENT`: then we also notice that it was gone before we asked.
    """
    if sys.platform != "linux":
        return
    _ask(sig)
    parent = os.environ.pop("CYBORG_PARENT", None)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), sig)
    if forks_too:
        os.register_at_fork(before=_remember, after_in_child=lambda: _again(sig))


def _ask(sig: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)


def _remember() -> None:
    global _parent
    _parent = os.getpid()


def _again(sig: int) -> None:
    _ask(sig)
    if os.getppid() != _parent:  # the parent was gone before the kernel knew of our wish
        os.kill(os.getpid(), sig)
