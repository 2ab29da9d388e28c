"""Shift the clock of this process, as if it ran on a machine whose clock differs from the database's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
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
