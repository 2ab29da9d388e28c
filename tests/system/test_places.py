"""Who may run it, and where its state may lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system.plain import as_plain_user, owner
from tests.system.product import Product, running

pytestmark = pytest.mark.system


def test_a_plain_user_below_a_folder_of_his_own(folder: Path) -> None:
    before = as_plain_user()
    os.chown(folder, owner(), -1)
    folder.chmod(0o700)
    product = Product(folder / "state", before=before)
    with running(product):
        found = {one.pid for one in product.remember()}
        users = {os.stat(f"/proc/{pid}").st_uid for pid in found if os.path.exists(f"/proc/{pid}")}
        assert users == {owner()}
        product.until(lambda: product.rows("SELECT 1 FROM accelerators_device"), 30, "the fake FPGA is seen")


def test_below_a_folder_only_its_owner_may_enter(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with running(Product(closed / "state", from_nothing=True)) as product:
        assert product.get("/readyz")[0] == 200


@pytest.mark.parametrize(
    "name",
    ["long/" * 20 + "path", 'ünd with, "all" that\'s \\possible % in {a} name'],
    ids=["too long for a socket", "odd"],
)
def test_below_a_path_that_is(folder: Path, name: str) -> None:
    deep = folder / name
    deep.mkdir(parents=True)
    with running(Product(deep / "state", from_nothing=True)) as product:
        assert product.get("/readyz")[0] == 200
        product.until(lambda: product.rows("SELECT 1 FROM accelerators_device"), 30, "the fake FPGA is seen")
