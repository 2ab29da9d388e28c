"""Whether the long version of each scenario runs: `make test-long` sets TEST_LONG=1."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
LONG = os.environ.get("TEST_LONG") == "1"


def scaled(short: T, long: T) -> T:
    """Return `long` in the long version, else `short`."""
    return long if LONG else short
