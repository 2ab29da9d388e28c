"""Test what the gateway logs while PostgreSQL is down and agents keep connecting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psycopg
import pytest
from django.db import connection

from accelerators.runtime import database_outage, pubsub
from agents import wire
from agents.gateway.asgi_app import AgentGateway
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def database_outage_block() -> Iterator[None]:
    """Have PostgreSQL end all connections to the tests' database, and refuse new ones."""
    name = connection.settings_dict["NAME"]
    connection.close()
    with psycopg.connect(**connection.get_connection_params() | {"dbname": "postgres"}, autocommit=True) as outside:
        outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            outside.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            yield
        finally:
            outside.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function that finds the log lines so far by a text that they contain. The outage log starts empty."""
    fresh = database_outage.OutageLog()
    monkeypatch.setattr(database_outage, "log_outage", fresh.log_outage)
    monkeypatch.setattr(database_outage, "log_recovery", fresh.log_recovery)
    return lambda text: [line for line in caplog.text.splitlines() if text in line]


@pytest.mark.slow
def test_an_outage_is_logged_once_however_many_agents_connect_and_so_is_its_end(
    agent: WireAgent, gateway: AgentGateway, lines: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "RETRY_S", 0.05)
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    agent.connect().close()
    with database_outage_block():
        monkeypatch.setattr("agents.gateway.asgi_app.ADMISSION_TIMEOUT_S", 0.3)
        for _ in range(8):
            assert agent.connect_refused() == (503, "database")
        (said,) = lines("PostgreSQL does not answer")
        assert "Check that PostgreSQL runs" in said and "asked to retry later" in said
        assert not lines("answers again")
        assert not lines("ERROR") and not lines("Traceback")
        assert len(lines("WARNING")) == 1
        monkeypatch.setattr("agents.gateway.asgi_app.ADMISSION_TIMEOUT_S", 30.0)
    with agent.connect() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
    until(lambda: lines("PostgreSQL answers again"))
    assert len(lines("PostgreSQL answers again")) == len(lines("PostgreSQL does not answer")) == 1


def test_a_refused_agent_causes_no_error_in_the_log(agent: WireAgent, lines: Callable[[str], list[str]]) -> None:
    for _ in range(3):
        assert agent.connect_refused(agent.credential("a challenge that nobody made")) == (401, "challenge")
    assert not lines("ERROR")


def test_a_long_outage_is_logged_once_a_minute_and_its_end_once(
    lines: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    # Not `time.monotonic` itself: the event loop of the file's web server would wait until the time set here.
    monkeypatch.setattr(database_outage, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = database_outage.OutageLog()
    log.log_recovery()
    for second in range(0, 130, 10):
        now[0] = 1000.0 + second
        log.log_outage(psycopg.OperationalError(""))
    assert len(lines("PostgreSQL does not answer (OperationalError)")) == 3
    log.log_recovery()
    log.log_recovery()
    assert len(lines("PostgreSQL answers again, after 120 s.")) == len(lines("answers again")) == 1
