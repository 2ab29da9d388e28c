"""Pause garbage collection while a process loads its code.

No imported object can be freed, but the collector would look at all of them again and again: this takes a quarter of
the CPU time of `manage.py --help` (measured).
"""

from __future__ import annotations

import gc

_is_paused = False


def pause_while_loading() -> None:
    """Disable garbage collection until `resume_after_loading` is called, which Django's start does."""
    global _is_paused
    _is_paused = True
    gc.disable()


def resume_after_loading() -> None:
    """Enable garbage collection again if it was paused, without the objects that exist now.

    They live as long as the process. Forked processes share their memory, because no collection writes to them.
    """
    global _is_paused
    if _is_paused:
        _is_paused = False
        gc.freeze()
        gc.enable()
