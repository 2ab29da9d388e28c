"""Test `/metrics` while another service does not answer: Keystone is away, or a table is locked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import OperationalError, connection, transaction
from keystoneauth1.exceptions import ConnectFailure, DiscoveryFailure
from keystoneauth1.identity import generic, v3
from keystoneauth1.noauth import NoAuth
from keystoneauth1.session import Session

from agents import telemetry
from agents.models import Gateway
from cyborgweb.monitoring import calls
from tests.cyborgweb.monitoring.test_metrics import compute_increase, get_value, scrape
from tests.support.webserver import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)
UNREACHABLE_URL = "http://127.0.0.1:1"
CREDENTIALS = {"username": "u", "password": "p", "user_domain_id": "default"}
NOVA_ENDPOINT_FILTER = {"service_type": "compute"}


@contextmanager
def lock_table(table: str) -> Iterator[None]:
    """Hold an exclusive lock on a table, so that no other session can read it."""
    with psycopg.connect(**connection.get_connection_params()) as other:
        other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield
        other.rollback()


@pytest.mark.parametrize(
    ("auth", "raised"),
    [
        (v3.Password(f"{UNREACHABLE_URL}/v3", **CREDENTIALS), ConnectFailure),
        (generic.Password(UNREACHABLE_URL, **CREDENTIALS), DiscoveryFailure),
    ],
    ids=["login", "discovery"],
)
def test_a_failed_login_is_counted_as_a_call_to_keystone_only(auth: Any, raised: type[Exception]) -> None:
    before, session = scrape(), calls.count_calls(Session(auth=auth))
    with pytest.raises(raised):
        session.get("http://127.0.0.1:1/servers", endpoint_filter=NOVA_ENDPOINT_FILTER, connect_retries=0)
    after = compute_increase(before, scrape())
    increases = {
        dict(labels)["service"]: after(name, **dict(labels))
        for name, labels in scrape()
        if name == "cyborg_cloud_calls_total" and after(name, **dict(labels))
    }
    assert increases == {"keystone": 1}


def test_a_call_after_a_failed_one_is_counted_as_well() -> None:
    before, session = scrape(), calls.count_calls(Session(auth=NoAuth()))
    try:
        session.get(f"{UNREACHABLE_URL}/auth", connect_retries=0)
    except ConnectFailure:
        with pytest.raises(ConnectFailure):
            session.get(f"{UNREACHABLE_URL}/servers", endpoint_filter=NOVA_ENDPOINT_FILTER, connect_retries=0)
    after = compute_increase(before, scrape())
    for service in ("keystone", "nova"):
        assert after("cyborg_cloud_calls_total", service=service, method="GET", status="unreachable") == 1


def test_reading_a_locked_table_of_gateways_times_out_and_the_scrape_shows_the_database_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "STATEMENT_TIMEOUT_MS", 100)
    monkeypatch.setattr(settings, "KEYS", replace(settings.KEYS, metrics_devices=True))
    with lock_table("agents_gateway"):
        telemetry.forget_gateways()
        began = time.monotonic()
        with pytest.raises(OperationalError, match="statement timeout"):
            telemetry.get_last_loads()
        assert get_value(scrape(), "cyborg_database_up") == 0
        assert time.monotonic() - began < 5 * PATIENCE
    assert get_value(scrape(), "cyborg_database_up") == 1


def test_reading_the_gateways_leaves_the_statement_timeout_of_the_connection_unchanged() -> None:
    def patience() -> str:
        with connection.cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            return str(cursor.fetchone()[0])

    Gateway.objects.create(name="far", url=UNREACHABLE_URL)
    before = patience()
    for _ in range(8):
        telemetry.forget_gateways()
        assert telemetry._gateway_pool._read_live_gateways() == {"far": UNREACHABLE_URL}
        assert patience() == before
        with transaction.atomic():
            telemetry.forget_gateways()
            assert telemetry._gateway_pool._read_live_gateways() == {"far": UNREACHABLE_URL}
            assert patience() == before
    telemetry.forget_gateways()
