"""One product for the tests of this folder, which kill no part of it.

Each test uses its own names and leaves the fake card as it found it. A test that kills a part of the product, changes
its settings or needs empty tables belongs elsewhere, with a separate product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.conftest import fresh_folder
from tests.system.machine import HOST, wait_for_fake_state
from tests.system.product import Product, running

SETTINGS = {
    "CYBORG_HOST_NAME": HOST,
    "CYBORG_HOST_NODE": "here",
    "CYBORG_RESCAN_S": "2",
    "CYBORG_DRIVER_DEADLINE_S": "3",
    "CYBORG_AGENT_LISTEN": "127.0.0.1:0",
}
"""The defaults, except that the agent rescans its hardware every 2 s and that agents connect to a separate listener."""


@pytest.fixture(scope="package")
def product() -> Iterator[Product]:
    """The product, whose agent has seen the fake card; it ends after the last test of this folder."""
    with fresh_folder() as folder, running(Product(folder / "state", SETTINGS)) as one:
        wait_for_fake_state(one, "ready")
        yield one


@pytest.fixture(autouse=True)
def _product_is_running(product: Product) -> Iterator[None]:
    """Fail a test if the product is dead before it or dies during it."""
    with product.required_during_test():
        yield
