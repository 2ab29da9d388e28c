"""Tests from end to end of attributes that an operator gives to a deployable.

They use the v2 API, an agent's reports through the gateway and the spool, the merge job, the intent, and the job that
writes providers to Placement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import Attribute, Deployable, Device, Host, Intent
from agents import jobs as agent_tasks
from agents import wire
from cyborgweb.models import ApiToken
from placement_sync.jobs import providers as placement_tasks
from tests.agents.gateway.test_gateway import make_report
from tests.placement_sync.session import PlacementModelSession, placement_session, using_placement_model
from tests.support.reports import make_card
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)

ADMIN = Caller("ops", "u", frozenset({"admin"}), "p1")


@pytest.fixture
def placement() -> Iterator[PlacementModelSession]:
    with using_placement_model() as session:
        yield session


def report_and_merge(socket: ClientConnection, seq: int) -> None:
    """Have the agent report the same card once more, and run the merge job."""
    send_report(socket, seq)
    agent_tasks.merge()


def send_report(socket: ClientConnection, seq: int) -> None:
    """Have the agent report the same card, and wait until the gateway has acknowledged the report."""
    answer = ask(socket, make_report(make_card(1), seq=seq))
    while isinstance(answer, wire.Welcome):  # the gateway has asked for the report again meanwhile
        answer = wire.decode_from_gateway(socket.recv(timeout=10))  # type: ignore[assignment]
    assert answer == wire.Ack(seq, "Report")


@contextmanager
def connected_but_report_forgotten(agent: WireAgent) -> Iterator[ClientConnection]:
    """Connect the agent, apply its report, and forget that it was applied, so that the gateway needs it again."""
    with agent.connect() as socket:
        report_and_merge(socket, 1)
        with conductor.writing():
            Host.objects.update(applied_hash="")
        yield socket


def call(client: Client, method: str, path: str, body: object = None) -> Any:
    """Send a request to the v2 API as an administrator; return the decoded answer, or None if it has no body."""
    if not (user := User.objects.filter(username="rita").first()):
        user = User.objects.create_user("rita")
    secret = ApiToken.create_with_secret(f"{method} {path}", user, ["admin"], "p1")
    response = client.generic(
        method, path, json.dumps(body), content_type="application/json", headers={"X-Auth-Token": secret}
    )
    assert response.status_code in (201, 204), response.content
    return json.loads(response.content) if response.content else None


def traits_in_placement() -> set[str]:
    """Run the job that writes providers until no intent is left; return the traits that the device's provider has."""
    while placement_tasks.step():
        pass
    assert not Intent.objects.filter(kind="provider").exists()
    return set(placement_session.model.providers[str(compute_provider_uuid("cmp1_0000:01:00.0"))].traits)


@pytest.mark.slow
def test_an_operators_attribute_survives_reports_and_reaches_placement(
    agent: WireAgent, client: Client, placement: PlacementModelSession
) -> None:
    # A new connection for each report, because the gateway tells an agent only in its Welcome which report was applied.
    with agent.connect() as socket:
        report_and_merge(socket, 1)
    lifecycle.enable_device(Device.objects.get().uuid, ADMIN)
    assert traits_in_placement() == {"CUSTOM_TEST"}
    given = {"deployable_id": Deployable.objects.get().id, "key": "trait9", "value": "CUSTOM_MINE"}
    uuid = call(client, "POST", "/v2/attributes", given)["uuid"]
    assert traits_in_placement() == {"CUSTOM_TEST", "CUSTOM_MINE"}
    with agent.connect() as socket:
        report_and_merge(socket, 2)
    assert traits_in_placement() == {"CUSTOM_TEST", "CUSTOM_MINE"}
    assert str(Attribute.objects.get(key="trait9").uuid) == uuid
    call(client, "DELETE", f"/v2/attributes/{uuid}")
    assert traits_in_placement() == {"CUSTOM_TEST"}


@pytest.mark.parametrize("reconnects", [True, False], ids=["new connection", "same connection"])
def test_an_agents_attribute_that_an_operator_overrode_returns_with_the_next_report(
    agent: WireAgent, client: Client, placement: PlacementModelSession, reconnects: bool
) -> None:
    socket = agent.connect()
    report_and_merge(socket, 1)
    lifecycle.enable_device(Device.objects.get().uuid, ADMIN)
    taken = {"deployable_id": Deployable.objects.get().id, "key": "trait0", "value": "CUSTOM_MINE"}
    uuid = call(client, "POST", "/v2/attributes", taken)["uuid"]
    report_and_merge(socket, 2)
    assert traits_in_placement() == {"CUSTOM_MINE"}
    call(client, "DELETE", f"/v2/attributes/{uuid}")
    assert not Attribute.objects.filter(key="trait0").exists()
    if reconnects:
        socket.close()
        socket = agent.connect()
        assert agent.welcome and agent.welcome.applied_hash == ""
    report_and_merge(socket, 3)
    assert Attribute.objects.get(key="trait0").value == "CUSTOM_TEST"
    assert traits_in_placement() == {"CUSTOM_TEST"}
    socket.close()


def receive_report_request(socket: ClientConnection) -> None:
    """Wait for the further Welcome by which the gateway asks for the report again."""
    message = wire.decode_from_gateway(socket.recv(timeout=10))
    assert isinstance(message, wire.Welcome) and message.applied_hash == ""


def test_a_removed_resource_class_comes_back_without_a_new_connection(
    agent: WireAgent, client: Client, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 1000.0)
    provider = str(compute_provider_uuid("cmp1_0000:01:00.0"))
    with agent.connect() as socket:
        report_and_merge(socket, 1)
        lifecycle.enable_device(Device.objects.get().uuid, ADMIN)
        traits_in_placement()
        inventory = placement_session.model.providers[provider].inventories
        assert inventory
        call(client, "DELETE", f"/v2/attributes/{Attribute.objects.get(key='rc').uuid}")
        receive_report_request(socket)
        traits_in_placement()
        assert not placement_session.model.providers[provider].inventories
        report_and_merge(socket, 2)
        traits_in_placement()
        assert placement_session.model.providers[provider].inventories == inventory


def test_an_agent_is_asked_for_its_report_even_if_the_notification_was_lost(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    with connected_but_report_forgotten(agent) as socket:
        receive_report_request(socket)


@pytest.mark.slow
def test_an_agent_is_not_asked_for_its_report_while_that_is_waiting_to_be_merged_or_on_its_way(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    with connected_but_report_forgotten(agent) as socket:
        with pytest.raises(TimeoutError):
            socket.recv(timeout=1)  # the agent was told by its Welcome, a moment ago, that no report is applied
        monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 0.0)
        receive_report_request(socket)
        monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 1000.0)
        send_report(socket, 2)
        monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 0.0)
        with pytest.raises(TimeoutError):
            socket.recv(timeout=1)
        agent_tasks.merge()
        assert Host.objects.get().applied_hash == make_report(make_card(1)).hash


@pytest.mark.slow
def test_an_agent_that_ignores_the_requests_for_its_report_is_asked_less_and_less_often(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    monkeypatch.setattr("agents.gateway.asgi_app.REPORT_REQUEST_INTERVAL_S", 0.2)
    with connected_but_report_forgotten(agent) as socket:
        times = []
        for _ in range(4):
            receive_report_request(socket)
            times.append(time.monotonic())
        pauses = [later - earlier for earlier, later in pairwise(times)]
        assert pauses[0] > 0.3 and pauses[1] > 0.7 and pauses[2] > 1.5
        monkeypatch.setattr("agents.gateway.asgi_app.MAX_REPORT_REQUEST_INTERVAL_S", 0.2)
        receive_report_request(socket)
        assert time.monotonic() - times[-1] < 1.5, "there is a longest interval"
