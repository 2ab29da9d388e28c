"""Fixtures of the driver tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.tree import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An empty host made of files."""
    return Host(tmp_path)
