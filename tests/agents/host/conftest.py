"""These tests are about a program without Django: what the suite does around the database is not for them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _single_writer() -> None:
    """Stands in for the suite's guard of the database, which this room cannot reach."""
