"""Shift the clock of this process, or let a test decide what happens while the code that it calls sleeps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo

import pytest
from django.utils import timezone

from accelerators.runtime import database_clock

PACKAGES = ("accelerators", "agents", "placement_sync", "cyborgweb", "django_q")


@contextmanager
def shifted_clock(seconds: float) -> Iterator[None]:
    """Run the block with a clock that is `seconds` ahead; the monotonic clock goes on as before.

    The database's clock has not been measured yet when the block begins.
    """
    true_time, shift = time.time, timedelta(seconds=seconds)

    class ShiftedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + shift

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: true_time() + seconds)
        patch.setattr(timezone, "now", lambda: datetime.now(tz=timezone.get_default_timezone()) + shift)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES and vars(module).get("datetime") is datetime:
                patch.setattr(module, "datetime", ShiftedDatetime)
        patch.setattr(database_clock, "_difference_s", None)
        patch.setattr(database_clock, "_measured_at", float("-inf"))
        yield


def replace_sleep(patch: pytest.MonkeyPatch, action: Callable[[float], object]) -> None:
    """Let `time.sleep` call `action` in the calling thread; other threads of the process, such as a server's, sleep."""
    calling_thread, sleep = threading.get_ident(), time.sleep

    def act_or_sleep(seconds: float) -> None:
        if threading.get_ident() == calling_thread:
            action(seconds)
        else:
            sleep(seconds)

    patch.setattr(time, "sleep", act_or_sleep)
