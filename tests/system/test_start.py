"""Test the start and the stop of the one-command product: its first login, its secrets, signals and its end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest

from cyborgweb.database.postgres import Postgres
from tests.system.product import Product, running, wait_and_kill_remaining

pytestmark = pytest.mark.system


def test_a_first_start_creates_a_login_and_secrets_and_a_second_start_keeps_them(folder: Path) -> None:
    product = Product(folder / "state", from_nothing=True)
    login = product.state / "first-login"
    with running(product):
        assert stat.S_IMODE(login.stat().st_mode) == 0o600
        assert product.wait_for_log(r"first login: admin, with the password in (\S+)")[1] == str(login)
        password = login.read_text().strip().removeprefix("admin / ")
        made = {path: path.read_bytes() for path in (login, product.state / "secret-key")}
        database = (product.state / "postgres" / "data" / "PG_VERSION").stat()
    with running(product):
        assert made == {path: path.read_bytes() for path in made}
        assert (product.state / "postgres" / "data" / "PG_VERSION").stat() == database
        assert product.wait_for_log(r"first login: admin, with the password in (\S+)")[1] == str(login)
        assert len(password) > 10 and password not in product.log()
        assert product.rows("SELECT count(*) FROM auth_user") == [(1,)]
        assert product.get("/readyz")[0] == 200


def test_a_product_started_without_agent_has_no_agent_join_token_or_admission_rule(folder: Path) -> None:
    with running(Product(folder / "state", options=("--no-agent",))) as product:
        for cluster in ("ingest", "work"):
            product.until(lambda c=cluster: product.child(c), 30, f"{cluster} runs")
        assert product.child("agent") is None
        assert not (product.state / "agent").exists()
        for table in ("agents_jointoken", "accelerators_admissionrule"):
            assert product.rows(f"SELECT count(*) FROM {table}") == [(0,)]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_stops_everything_in_order(folder: Path, sig: signal.Signals) -> None:
    product = Product(folder / "state")
    with running(product):
        product.until(lambda: len(product.drivers()) == 2, 30, "both drivers run")
        for name, count in (("ingest", 1), ("work", 2)):
            product.until(lambda n=name, c=count: product.workers(n, c), 30, f"{name} is complete")
        assert product.interrupt(sig) in (0, 128 + sig)
        assert not product.list_left_processes()
        assert re.search(rf"{sig.name}: stopping\n(.*\n)*.*serve    \| stopped\n$", product.log())
        assert "Traceback" not in product.log()
        with pytest.raises(pytest.fail.Exception, match="The shared product died just now: its supervisor ended"):
            product.require_running("just now")
    assert not (product.state / "postgres" / "data" / "postmaster.pid").exists(), "PostgreSQL was not shut down"
    assert "was not properly shut down" not in restart_database_and_read_log(product)


def restart_database_and_read_log(product: Product) -> str:
    """Start PostgreSQL again over the same data and return its log, which tells whether it was shut down properly."""
    server = Postgres(product.state / "postgres", os.environ.get("CYBORG_PG_BIN", ""))
    try:
        server.start()
        return (product.state / "postgres" / "log").read_text()
    finally:
        server.stop()


def test_a_signal_during_the_start_stops_the_product(folder: Path) -> None:
    product = Product(folder / "state")
    product.start_process()
    try:
        product.wait_for_log("accepting connections")
        product.interrupt(signal.SIGINT)
    finally:
        wait_and_kill_remaining(product)


def test_a_signal_stops_the_product_while_the_database_cannot_be_restarted(folder: Path) -> None:
    product = Product(folder / "state")
    with running(product):
        shutil.rmtree(product.state / "postgres" / "data" / "global")
        postmaster = product.postmaster()
        assert postmaster
        os.kill(postmaster.pid, signal.SIGKILL)
        product.wait_for_log(r"postgres +\| ended with -9: starting it again")
        assert product.interrupt(signal.SIGTERM) in (0, 128 + signal.SIGTERM)
        assert product.log().endswith("serve    | stopped\n")


def test_the_product_ends_with_the_process_that_started_it(folder: Path) -> None:
    """Therefore `make up` ends when its terminal is closed or its shell is killed with SIGKILL."""
    product = Product(folder / "state", before=("sh", "-c", '"$@"; exit $?', "shell"))
    with running(product):
        product.remember_processes()
        assert product.process
        product.process.kill()
        product.process.wait()
        product.wait_until_nothing_is_left()
