"""Make a process end when its parent ends, even if the parent is killed with SIGKILL.

Every process that this product starts must call `die_with_parent` first: the supervisor's children, the clusters'
workers, the drivers. It works on Linux only (prctl(2) PR_SET_PDEATHSIG). On other systems it does nothing, and a
process ends only when its pipes are closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

_parent_pid = 0


def die_with_parent(sig: int = signal.SIGKILL, *, include_forks: bool = False) -> None:
    """Make the kernel send `sig` to this process when the parent's thread that started it ends.

    With `include_forks`, every later fork of this process does the same for itself, because the kernel clears
    PR_SET_PDEATHSIG in a child of os.fork() (django-q2 uses it). The parent may put its process id into
    `CYBORG_PARENT`, which is removed from the environment; then this process also signals itself if the parent ended
    before this call.
    """
    if sys.platform != "linux":
        return
    _set_death_signal(sig)
    parent = os.environ.pop("CYBORG_PARENT", None)
    if parent is not None and os.getppid() != int(parent):
        os.kill(os.getpid(), sig)
    if include_forks:
        os.register_at_fork(before=_remember_parent, after_in_child=lambda: _set_death_signal_after_fork(sig))


def _set_death_signal(sig: int) -> None:
    """Make the kernel send `sig` to this process when its parent ends; a failure of prctl is ignored."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)


def _remember_parent() -> None:
    """Store the id of this process, which forks next. Python calls it before each fork."""
    global _parent_pid
    _parent_pid = os.getpid()


def _set_death_signal_after_fork(sig: int) -> None:
    """Set the death signal in a new child; if its parent has ended already, the child signals itself."""
    _set_death_signal(sig)
    if os.getppid() != _parent_pid:  # the parent ended before prctl was called
        os.kill(os.getpid(), sig)
