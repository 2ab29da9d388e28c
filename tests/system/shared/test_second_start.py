"""Test that a second product cannot start over a state directory that is in use, and does not disturb the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.product import Product

pytestmark = pytest.mark.system


def test_a_second_product_over_the_same_state_directory_is_refused(product: Product, folder: Path) -> None:
    first = {product.child(name) for name in ("web", "ingest", "work", "agent")}
    second = Product(product.state)
    second.log_file = folder / "second.log"
    second.start_process()
    assert second.process and second.process.wait(60) == 2
    assert str(product.state) in second.log() and "another process of the product runs on" in second.log()
    assert second.log().count("\n") == 1
    assert None not in first
    assert {product.child(name) for name in ("web", "ingest", "work", "agent")} == first
    assert product.get("/readyz")[0] == 200
