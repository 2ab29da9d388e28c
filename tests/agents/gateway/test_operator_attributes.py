"""Tests from end to end of attributes that an operator gives to a deployable.

They use the v2 API, an agent's reports through the gateway and the spool, the merge job, the intent, and the job that
writes providers to Placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from websockets.sync.client import ClientConnection

from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import Attribute, Deployable, Device, Intent
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
    """Have the agent report the same card once more, as it does at its slow rescan, and run the merge job."""
    assert ask(socket, make_report(make_card(1), seq=seq)) == wire.Ack(seq, "Report")
    agent_tasks.merge()


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
    return set(placement_session.model.providers[str(compute_provider_uuid("node_0000:01:00.0"))].traits)


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
