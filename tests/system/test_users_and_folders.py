"""Test which users can run the product and where its state directory can be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system.product import Product, running
from tests.system.unprivileged import as_plain_user, plain_user_id

pytestmark = pytest.mark.system


def test_a_plain_user_can_run_the_product_below_an_own_folder(folder: Path) -> None:
    before = as_plain_user()
    os.chown(folder, plain_user_id(), -1)
    folder.chmod(0o700)
    product = Product(folder / "state", before=before)
    with running(product):
        found = {one.pid for one in product.remember_processes()}
        users = {os.stat(f"/proc/{pid}").st_uid for pid in found if os.path.exists(f"/proc/{pid}")}
        assert users == {plain_user_id()}
        product.until(lambda: product.rows("SELECT 1 FROM accelerators_device"), 30, "the fake FPGA is seen")


def test_the_product_runs_below_a_folder_that_only_its_owner_may_enter(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with running(Product(closed / "state", from_nothing=True)) as product:
        assert product.get("/readyz")[0] == 200


@pytest.mark.parametrize(
    "name",
    ["long/" * 20 + "path", 'ünd with, "all" that\'s \\possible % in {a} name'],
    ids=["too long for a socket", "odd"],
)
def test_the_product_runs_below_a_very_long_or_odd_path(folder: Path, name: str) -> None:
    deep = folder / name
    deep.mkdir(parents=True)
    with running(Product(deep / "state", from_nothing=True)) as product:
        assert product.get("/readyz")[0] == 200
        product.until(lambda: product.rows("SELECT 1 FROM accelerators_device"), 30, "the fake FPGA is seen")
