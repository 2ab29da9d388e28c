"""The model of Placement, for the tests of what is written there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.placement_sync.session import PlacementModelSession, using_placement_model


@pytest.fixture
def placement() -> Iterator[PlacementModelSession]:
    """Let the product talk to a model of Placement; return the model's session."""
    with using_placement_model() as session:
        yield session
