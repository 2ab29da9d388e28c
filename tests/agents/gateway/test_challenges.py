"""Tests of challenges that one gateway issues and another gateway of the installation accepts, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators.runtime import database_clock
from agents import authentication, wire
from agents.authentication import IssuedNonce
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.image_server import ImageServer
from agents.models import UsedNonce
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.support.webserver import serving, until
from tests.support.wireagent import WireAgent, ask, make_join_secret

pytestmark = pytest.mark.django_db(transaction=True)
USED = (401, "challenge")


@pytest.fixture(scope="module")
def second_slot() -> Iterator[GatewaySlot]:
    made = GatewaySlot()
    with serving(made) as made.port:
        yield made


@pytest.fixture
def start_second(second_slot: GatewaySlot, agent: WireAgent) -> Iterator[Callable[[], WireAgent]]:
    """Return a function that starts another gateway on the same database, instead of the one that it has started
    before. The function returns the agent as it connects there.
    """
    started: list[AgentGateway] = []

    def start() -> WireAgent:
        started.append(AgentGateway(Keys(lease_flush_s=0.05)))
        second_slot.gateway = started[-1]
        return replace(agent, port=second_slot.port)

    yield start
    for gateway in started:
        gateway.stop()


def test_C2_a_challenge_of_one_gateway_is_answered_once_at_any_other_and_also_after_a_restart(
    agent: WireAgent, start_second: Callable[[], WireAgent]
) -> None:
    there = start_second()
    header = agent.credential(agent.challenge())
    with there.connect(header) as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
    assert agent.connect_refused(header) == there.connect_refused(header) == USED
    header = agent.credential(there.challenge())
    later = start_second()
    later.connect(header).close()
    assert start_second().connect_refused(header) == USED, "a restarted gateway does not accept it again"
    assert UsedNonce.objects.count() == 2


def test_an_altered_foreign_or_expired_challenge_is_refused_at_every_gateway(
    agent: WireAgent, gateway: AgentGateway, start_second: Callable[[], WireAgent], settings: Any
) -> None:
    there = start_second()
    nonce = agent.challenge()
    later = nonce.replace(".", ".9", 1)
    for forged in (later, "x" + nonce, nonce[:-1], nonce.partition(":")[0], "", ":", "a nonce that nobody signed"):
        assert there.connect_refused(agent.credential(forged)) == USED, forged
    for age in (31.0, -31.0):
        database_clock.note_timestamp(time.time() - age)
        assert there.connect_refused(agent.credential(agent.challenge())) == USED, age
    settings.SECRET_KEY = "of another installation"
    foreign = start_second().challenge()
    assert agent.connect_refused(agent.credential(foreign)) == USED
    assert not UsedNonce.objects.exists()


def test_a_challenge_signed_with_a_former_secret_key_is_accepted_while_that_is_a_fallback(
    agent: WireAgent, start_second: Callable[[], WireAgent], settings: Any
) -> None:
    header = agent.credential(agent.challenge())
    former, settings.SECRET_KEY = settings.SECRET_KEY, "the new key"
    assert start_second().connect_refused(header) == USED
    settings.SECRET_KEY_FALLBACKS = [former]
    start_second().connect(header).close()


def test_a_gateway_whose_clock_is_wrong_learns_the_time_of_the_database(
    agent: WireAgent, gateway: AgentGateway, start_second: Callable[[], WireAgent]
) -> None:
    database_clock.note_timestamp(time.time() - 3600)
    assert agent.connect_refused() == USED
    there = start_second()
    there.connect(agent.credential(agent.challenge())).close()


def test_a_challenge_that_was_answered_with_a_connection_fetches_no_image_elsewhere(
    agent: WireAgent, start_second: Callable[[], WireAgent], second_slot: GatewaySlot
) -> None:
    start_second()
    header = agent.credential(agent.challenge())
    agent.connect(header).close()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "GET", "path": f"{wire.IMAGE_PATH}x", "headers": [(b"authorization", header.encode())]}
    server = ImageServer(second_slot.gateway.challenges, second_slot.gateway.refusals)
    asyncio.run(server(scope, None, send))
    assert sent[0]["status"] == 401


def test_the_nonces_of_many_handshakes_are_recorded_by_the_statement_that_looks_up_their_keys() -> None:
    now = time.time()
    requests = [(f"key {number}", True, IssuedNonce(f"nonce {number}", now)) for number in range(50)]
    with CaptureQueriesContext(connection) as statements:
        assert all(lookup.is_accepted for lookup in authentication.find_enrolled(requests))
    assert len(statements) == 1
    assert not any(lookup.is_accepted for lookup in authentication.find_enrolled(requests))
    assert [one.is_accepted for one in authentication.find_enrolled([("key", True, None), requests[0]])] == [
        True,
        False,
    ]
    assert abs(authentication.find_enrolled(requests)[0].database_time - now) < 30


def test_a_challenge_that_another_gateway_is_just_recording_delays_no_other_agent(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    other = WireAgent(agent.port, host="cmp2", token=make_join_secret("cmp2"))
    nonce = agent.challenge()
    with ThreadPoolExecutor(1) as threads, other.connect() as socket:
        with psycopg.connect(**connection.get_connection_params()) as outside:
            outside.execute("INSERT INTO agents_usednonce (nonce) VALUES (%s)", [nonce.partition(".")[0]])
            connecting = threads.submit(agent.connect, agent.credential(nonce))
            until(lambda: gateway._writer._held_jobs, 2)
            other.connect().close()
            assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
            outside.rollback()
        connecting.result(10).close()


def test_X5_a_client_that_can_not_be_admitted_leaves_no_row(agent: WireAgent) -> None:
    status, text = replace(agent, token="").connect_refused()
    assert (status, UsedNonce.objects.count()) == (403, 0), text
    agent.connect().close()
    assert UsedNonce.objects.count() == 1
    header = agent.credential(agent.challenge())
    replace(agent, token="").connect(header).close()
    assert agent.connect_refused(header) == USED, "the nonce of an enrolled key is used up"


def test_used_nonces_are_deleted_long_after_they_have_expired(agent: WireAgent) -> None:
    old = datetime.now(UTC) - timedelta(minutes=11)
    UsedNonce.objects.bulk_create(UsedNonce(nonce=f"old {number}", used_at=old) for number in range(3))
    UsedNonce.objects.create(nonce="recent", used_at=old + timedelta(minutes=2))
    with agent.connect():
        until(lambda: not UsedNonce.objects.filter(nonce__startswith="old").exists())
    assert UsedNonce.objects.filter(nonce="recent").exists()
