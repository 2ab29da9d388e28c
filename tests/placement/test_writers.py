"""Two writers: who calls Placement is switched live, and nothing is done twice, beside each other, or left out."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from typing import Any

import msgspec
import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import placing
from accelerators.commands.placing import CommandAnswer
from accelerators.devices import lifecycle
from accelerators.domain.errors import RefusedError
from accelerators.models import Command, Device, Event, Host, Intent
from accelerators.workflows import command_results
from agents.models import Agent, Lease
from placement_sync.client import PlacementClient
from placement_sync.direct import ProviderWork
from placement_sync.jobs import providers, writer_election
from placement_sync.models import Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider
from placement_sync.sync import synchronize_host
from tests.placement.session import Session
from tests.placement.test_tasks import ADMIN, ROOT, due_now, provider, ready

pytestmark = pytest.mark.django_db
there = Session()


def cloud() -> Session:
    return there


@pytest.fixture(autouse=True)
def placement(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Session:
    there.__init__()  # type: ignore[misc]
    there.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    monkeypatch.setattr("tests.placement.test_tasks.there", there)
    settings.SERVICE_SESSION = "tests.placement.test_writers.cloud"
    return there


@pytest.fixture
def host() -> Host:
    """Its agent is up and can write; agents are the writer."""
    host = ready()
    Agent.objects.create(host=host, public_key="k", version="0.2", wire="v1", boot_id="b", ops="placement", writes="")
    Lease.objects.create(host=host, seen_at=datetime.now(UTC))
    writer_election.switch_writer("agents", "olga", "closer to the hardware")
    return host


def placed() -> list[Command]:
    return list(Command.objects.filter(op="placement").order_by("id"))


def intent() -> Intent:
    return Intent.objects.get(kind="provider")


def ends(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    placing.store_answers([CommandAnswer(command.host_id, command.pk, outcome, text)])
    command_results.end_answered_commands()


def does(command: Command) -> int:
    """What an agent does with it; how often it wrote."""
    work = msgspec.json.decode(command.arguments["payload"], type=ProviderWork)
    at = PlacementClient(there, work.endpoint)
    synchronize_host(at, command.host.name, work.desired, work.written, work.root)
    ends(command)
    return at.writes


def wrote() -> int:
    """How often Placement was written since the last time it was asked."""
    calls = [call for call in there.seen if not call.startswith("GET")]
    there.seen.clear()
    return len(calls)


def test_what_differs_goes_to_the_agent_and_the_conductor_looks_and_notes(host: Host) -> None:
    providers.step()
    (command,) = placed()
    assert (wrote(), intent().last_error, intent().attempts) == (0, "its agent is writing", 0)
    assert (command.arguments["writer"], command.actor, command.reason) == (1, "placement", "writes: 3")
    due_now()
    providers.step()
    assert (len(placed()), wrote()) == (1, 0), "one at a time"
    assert does(command) == 4
    there.seen.clear()
    providers.step()
    assert wrote() == 0
    assert not Intent.objects.filter(kind="provider")
    known = WrittenProvider.objects.get()
    assert (known.classes, known.traits) == (["FPGA"], ["CUSTOM_TEST"])
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert (len(placed()), len(there.seen)) == (1, 1), "in step: one read"


def test_what_is_raised_meanwhile_waits_for_the_command_and_is_told_next(host: Host) -> None:
    providers.step()
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN)
    providers.step()
    (first,) = placed()
    does(first)
    providers.step()
    _, second = placed()
    does(second)
    providers.step()
    assert provider().inventories["FPGA"]["reserved"] == 4
    assert (len(placed()), Intent.objects.filter(kind="provider").count()) == (2, 0)


def test_what_an_agent_could_not_do_the_conductor_mends(host: Host) -> None:
    providers.step()
    ends(placed()[0], "failed", "its password is wrong")
    wrote()
    providers.step()
    assert wrote() == 4
    assert provider() and len(placed()) == 1
    assert not Intent.objects.filter(kind="provider")
    del there.model.providers[provider().uuid]
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert (len(placed()), wrote()) == (2, 0), "what somebody broke is the agent's again"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"writes": "the host has no credentials"}, "the host has no credentials"),
        ({"writes": None}, "its agent (release 0.2) does not support Placement writes: update it"),
        ({"barred": "revoked"}, "its agent may not connect: revoked"),
        ({}, "its agent is down"),
    ],
)
def test_for_who_cannot_the_conductor_writes_and_shows_why(host: Host, changes: dict[str, Any], why: str) -> None:
    Agent.objects.update(**changes)
    if not changes:
        Lease.objects.update(seen_at="2020-01-01T00:00:00Z")
    providers.step()
    assert provider() and not placed()
    out = StringIO()
    call_command("placement_writer", stdout=out)
    assert out.getvalue().splitlines()[-1] == f"  cmp1  {why}"


def test_it_does_not_write_beside_an_agent_but_takes_over_from_one_that_is_silent(host: Host) -> None:
    providers.step()
    (command,) = placed()
    placing.mark_commands_taken([(host.id, command.pk)])
    writer_election.switch_writer("conductor", "olga")
    due_now()
    providers.step()
    assert (wrote(), intent().last_error) == (0, "its agent is writing")
    Lease.objects.update(seen_at="2020-01-01T00:00:00Z")
    due_now()
    providers.step()
    assert wrote() == 0
    with conductor.writing():
        Command.objects.update(end_by="2020-01-01T00:00:00Z")  # a test is one transaction, whose clock stands still
    command_results.end_late_commands()
    providers.step()
    assert provider() and not Intent.objects.filter(kind="provider")
    command.refresh_from_db()
    assert command.state == "unknown"


def test_a_switch_is_an_event_raises_the_epoch_and_withdraws_what_nobody_took(host: Host) -> None:
    providers.step()
    assert writer_election.switch_writer("agents", "olga").epoch == 1, "it is already"
    assert writer_election.switch_writer("conductor", "olga", "audit").epoch == 2
    event = Event.objects.filter(action="placement.writer").latest("id")
    assert (event.actor, event.reason) == ("olga", "audit")
    assert event.changes == {"writer": ["agents", "conductor"], "epoch": [1, 2]}
    command_results.end_answered_commands()
    assert (placed()[0].state, placed()[0].text) == ("refused", "the writer is now: conductor")
    providers.step()
    assert provider() and not Intent.objects.filter(kind="provider")
    wrote()
    for who in ("agents", "conductor"):
        writer_election.switch_writer(who, "olga")
        conductor.raise_provider_intents([host])
        providers.step()
    assert (wrote(), len(placed())) == (0, 1), "a switch writes nothing"
    with pytest.raises(RefusedError, match="name conductor or agents"):
        writer_election.switch_writer("nova", "olga")


def test_more_than_a_command_holds_is_written_by_the_conductor(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_election, "MAX_PAYLOAD_BYTES", 10)
    providers.step()
    providers.step()
    assert provider() and not placed()


def test_the_commands_say_who_writes(host: Host) -> None:
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("placement_sync", stdout=out)
    assert "its agent writes for this host and is sent the differences" in out.getvalue()
    assert wrote() == 0
    providers.step()
    assert len(placed()) == 1
    out = StringIO()
    call_command("placement_writer", stdout=out)
    assert out.getvalue().startswith("agents, epoch 1, since ")
    assert "by olga: closer to the hardware" in out.getvalue()
    out = StringIO()
    call_command("placement_writer", "conductor", reason="audit", stdout=out)
    assert out.getvalue().startswith("conductor, epoch 2, since ")
    with pytest.raises(CommandError, match="at most 500 characters"):
        call_command("placement_writer", "agents", reason="x" * 501)


def test_the_console_changes_it_and_says_who_cannot(host: Host, client: Client) -> None:
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    Agent.objects.update(writes="the host has no credentials")
    listed = reverse("admin:placement_sync_writer_changelist")
    page = client.get(listed, follow=True).content.decode()
    assert "agents (epoch 1), changed" in page and "by olga: closer to the hardware" in page
    assert "<td>cmp1</td><td>the host has no credentials</td>" in page
    address = reverse("admin:placement_sync_writer_change", args=[1])
    client.post(address, {"who": "conductor", "reason": "audit"})
    now = writer_election.get_writer()
    assert (now.who, now.epoch, now.by, now.reason) == ("conductor", 2, "olga", "audit")
    assert client.post(address, {"who": "nova", "reason": ""}).status_code == 200
    assert writer_election.get_writer().epoch == 2
    viewer = User.objects.create(username="vera", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_writer"))
    client.force_login(viewer)
    assert client.get(address).status_code == 200
    assert client.post(address, {"who": "agents", "reason": ""}).status_code == 403
