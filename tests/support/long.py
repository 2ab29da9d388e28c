"""Choose between the short and the long version of a scenario: `make test-long` sets TEST_LONG=1."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = os.environ.get("TEST_LONG") == "1"


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test its argument `examples`: `few` in the fast lane; `many` in the lane of exhaustive tests."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.exhaustive)])


def scaled(short: T, long: T) -> T:
    """Return `long` in the long version, else `short`."""
    return long if LONG else short
