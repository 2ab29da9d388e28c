"""Test that a start that cannot succeed prints one clear sentence, exits with status 2 and leaves no process."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from cyborgweb.database.postgres import find_binaries
from tests.system.product import Product, wait_and_kill_remaining
from tests.system.unprivileged import as_plain_user

pytestmark = pytest.mark.system


def start_and_get_refusal(product: Product) -> str:
    """Start the product, check that it exits with status 2 and one sentence after its log, and return the sentence."""
    product.start_process()
    assert product.process
    try:
        assert product.process.wait(60) == 2, product.log()
    finally:
        wait_and_kill_remaining(product)
    *log, sentence = product.log().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d \S+ +\| ", line) for line in log), "more than the log and one sentence"
    assert sentence.startswith("cyborgweb: ")
    return sentence


def test_a_start_at_a_used_port_is_refused(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = start_and_get_refusal(Product(folder / "state", {"CYBORG_LISTEN": address}))
    assert address in said and "in use" in said and "CYBORG_LISTEN" in said


@pytest.mark.parametrize("listen", ["8000", "somewhere", "127.0.0.1:x", "127.0.0.1:99999", "not-an-address:80"])
def test_a_start_with_an_invalid_listen_address_is_refused(folder: Path, listen: str) -> None:
    assert "CYBORG_LISTEN" in start_and_get_refusal(Product(folder / "state", {"CYBORG_LISTEN": listen}))


def test_a_start_with_an_unusable_setting_is_refused_with_key_and_value(folder: Path) -> None:
    said = start_and_get_refusal(Product(folder / "state", {"CYBORG_BEAT_S": "soon"}))
    assert "CYBORG_BEAT_S" in said and "soon" in said


def test_a_state_directory_below_a_file_is_refused(folder: Path) -> None:
    (folder / "file").write_text("")
    said = start_and_get_refusal(Product(folder / "file" / "state"))
    assert "CYBORG_STATE_DIR" in said and str(folder) in said


@pytest.mark.parametrize("made", [True, False], ids=["exists", "its parent exists"])
def test_a_state_directory_that_is_not_writable_is_refused(folder: Path, made: bool) -> None:
    before = as_plain_user()
    closed = folder / "closed"
    closed.mkdir(mode=0o755)
    os.chown(closed, os.getuid(), os.getgid())
    if not before:
        closed.chmod(0o555)
    os.chmod(folder, 0o755)
    said = start_and_get_refusal(Product(closed if made else closed / "state", before=before))
    assert "CYBORG_STATE_DIR" in said and str(closed) in said and "not writable" in said


def test_data_of_another_postgresql_version_are_refused_and_left_untouched(folder: Path) -> None:
    data = folder / "state" / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("14\n")
    said = start_and_get_refusal(Product(folder / "state"))
    assert "PostgreSQL 14" in said and "pg_dumpall" in said
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"], "it touched the data"


def test_damaged_postgresql_data_are_refused_with_the_place_of_the_log(folder: Path) -> None:
    data = folder / "state" / "postgres" / "data"
    data.mkdir(parents=True, mode=0o700)
    (data / "PG_VERSION").write_text(f"{find_binaries(os.environ.get('CYBORG_PG_BIN', '')).major}\n")
    said = start_and_get_refusal(Product(folder / "state"))
    assert "PostgreSQL does not start" in said and "postgres/log" in said


def test_postgresql_data_without_a_version_file_are_refused_and_kept(folder: Path) -> None:
    """The version of such data is unknown, and a new database in their place would destroy them."""
    data = folder / "state" / "postgres" / "data"
    (data / "base").mkdir(parents=True, mode=0o700)
    said = start_and_get_refusal(Product(folder / "state"))
    assert str(data) in said and "PG_VERSION" in said
    assert (data / "base").is_dir()
