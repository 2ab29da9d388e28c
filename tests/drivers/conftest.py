"""Fixtures of the driver tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.tree import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """An empty host made of files."""
    return FakeHost(tmp_path)
