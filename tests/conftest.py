"""The guard of the single-writer rule, around every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _single_writer() -> Iterator[None]:
    """Any statement that writes inventory outside `conductor.writing()` fails its test."""
    from django.db import connection

    from tests.support.writeguard import guard

    with connection.execute_wrapper(guard):
        yield
