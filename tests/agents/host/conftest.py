"""Fixtures for the tests of the agent, which runs without Django and without a database."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _single_writer() -> None:
    """Replace the fixture of the whole suite that guards database writes: tests in this folder have no database."""
