"""Test the two writers of Placement, conductor and agents: no write is lost, doubled or concurrent after a switch."""

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
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.devices import lifecycle
from accelerators.domain.errors import RefusedError
from accelerators.models import Command, Device, Event, Host, Intent
from accelerators.workflows import command_endings
from agents.models import Agent, Lease
from placement_sync.agent_writer import ProviderWork
from placement_sync.apply_writes import synchronize_host
from placement_sync.client import PlacementClient
from placement_sync.jobs import providers, writer_election
from placement_sync.models import Tree, WrittenProvider
from tests.placement_sync.session import (
    placement_session,
)
from tests.placement_sync.test_providers_job import ADMIN, make_intents_due, make_ready_host, observed_provider

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("placement")]


@pytest.fixture
def host() -> Host:
    """Return a host whose agent is up and can write to Placement; agents are the writer."""
    host = make_ready_host()
    Agent.objects.create(host=host, public_key="k", version="0.2", wire="v1", boot_id="b", ops="placement", writes="")
    Lease.objects.create(host=host, seen_at=datetime.now(UTC))
    writer_election.switch_writer("agents", "olga", "closer to the hardware")
    return host


def list_placement_commands() -> list[Command]:
    return list(Command.objects.filter(op="placement").order_by("id"))


def provider_intent() -> Intent:
    return Intent.objects.get(kind="provider")


def end_command(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    command_queue.store_answers([CommandAnswer(command.host_id, command.pk, outcome, text)])
    command_endings.end_answered_commands()


def run_as_agent(command: Command) -> int:
    """Carry out the command as an agent does, and return how many writes that took."""
    work = msgspec.json.decode(command.arguments["payload"], type=ProviderWork)
    client = PlacementClient(placement_session, work.endpoint)
    synchronize_host(client, command.host.name, work.desired, work.written, work.root)
    end_command(command)
    return client.writes


def count_new_writes() -> int:
    """Return the number of writes to Placement since the calls were last cleared, and clear them."""
    calls = [call for call in placement_session.seen_calls if not call.startswith("GET")]
    placement_session.seen_calls.clear()
    return len(calls)


def test_differences_are_sent_to_the_agent_and_the_conductor_only_verifies_them(host: Host) -> None:
    providers.step()
    (command,) = list_placement_commands()
    assert (count_new_writes(), provider_intent().last_error, provider_intent().attempts) == (
        0,
        "its agent is writing",
        0,
    )
    assert (command.arguments["writer"], command.actor, command.reason) == (1, "placement", "writes: 3")
    make_intents_due()
    providers.step()
    assert (len(list_placement_commands()), count_new_writes()) == (1, 0), "one at a time"
    assert run_as_agent(command) == 4
    placement_session.seen_calls.clear()
    providers.step()
    assert count_new_writes() == 0
    assert not Intent.objects.filter(kind="provider")
    known = WrittenProvider.objects.get()
    assert (known.classes, known.traits) == (["FPGA"], ["CUSTOM_TEST"])
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert (len(list_placement_commands()), len(placement_session.seen_calls)) == (1, 1), "in step: one read"


def test_a_change_during_a_placement_command_is_sent_in_the_next_command(host: Host) -> None:
    providers.step()
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN)
    providers.step()
    (first,) = list_placement_commands()
    run_as_agent(first)
    providers.step()
    _, second = list_placement_commands()
    run_as_agent(second)
    providers.step()
    assert observed_provider().inventories["FPGA"]["reserved"] == 4
    assert (len(list_placement_commands()), Intent.objects.filter(kind="provider").count()) == (2, 0)


def test_the_conductor_writes_after_the_command_of_an_agent_failed(host: Host) -> None:
    providers.step()
    end_command(list_placement_commands()[0], "failed", "its password is wrong")
    count_new_writes()
    providers.step()
    assert count_new_writes() == 4
    assert observed_provider() and len(list_placement_commands()) == 1
    assert not Intent.objects.filter(kind="provider")
    del placement_session.model.providers[observed_provider().uuid]
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert (len(list_placement_commands()), count_new_writes()) == (2, 0), "what somebody broke is the agent's again"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"writes": "the host has no credentials"}, "the host has no credentials"),
        ({"writes": None}, "its agent (release 0.2) does not support Placement writes: update it"),
        (
            {"barred": "revoked", "barred_reason": "by olga"},
            "its agent was revoked (by olga): to have it back, make a token with `manage.py join_token HOST`",
        ),
        ({}, "its agent is down"),
    ],
)
def test_the_conductor_writes_for_a_host_whose_agent_cannot_and_shows_why(
    host: Host, changes: dict[str, Any], why: str
) -> None:
    Agent.objects.update(**changes)
    if not changes:
        Lease.objects.update(seen_at="2020-01-01T00:00:00Z")
    providers.step()
    assert observed_provider() and not list_placement_commands()
    out = StringIO()
    call_command("placement_writer", stdout=out)
    assert out.getvalue().splitlines()[-1] == f"  cmp1  {why}"


def test_the_conductor_takes_over_only_when_the_command_of_a_silent_agent_has_expired(host: Host) -> None:
    providers.step()
    (command,) = list_placement_commands()
    command_queue.mark_commands_taken([(host.id, command.pk)])
    writer_election.switch_writer("conductor", "olga")
    make_intents_due()
    providers.step()
    assert (count_new_writes(), provider_intent().last_error) == (0, "its agent is writing")
    Lease.objects.update(seen_at="2020-01-01T00:00:00Z")
    make_intents_due()
    providers.step()
    assert count_new_writes() == 0
    with conductor.writing():
        # the test is one transaction, in which PostgreSQL's now() does not advance
        Command.objects.update(end_by="2020-01-01T00:00:00Z")
    command_endings.end_late_commands()
    providers.step()
    assert observed_provider() and not Intent.objects.filter(kind="provider")
    command.refresh_from_db()
    assert command.state == "unknown"


def test_switching_the_writer_records_an_event_raises_the_epoch_and_withdraws_commands(host: Host) -> None:
    providers.step()
    assert writer_election.switch_writer("agents", "olga").epoch == 1, "it is already"
    assert writer_election.switch_writer("conductor", "olga", "audit").epoch == 2
    event = Event.objects.filter(action="placement.writer").latest("id")
    assert (event.actor, event.reason) == ("olga", "audit")
    assert event.changes == {"writer": ["agents", "conductor"], "epoch": [1, 2]}
    command_endings.end_answered_commands()
    assert (list_placement_commands()[0].state, list_placement_commands()[0].text) == (
        "refused",
        "the writer is now: conductor",
    )
    providers.step()
    assert observed_provider() and not Intent.objects.filter(kind="provider")
    count_new_writes()
    for who in ("agents", "conductor"):
        writer_election.switch_writer(who, "olga")
        conductor.raise_provider_intents([host])
        providers.step()
    assert (count_new_writes(), len(list_placement_commands())) == (0, 1), "a switch writes nothing"
    with pytest.raises(RefusedError, match="name conductor or agents"):
        writer_election.switch_writer("nova", "olga")


def test_changes_too_large_for_a_command_are_written_by_the_conductor(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_election, "MAX_PAYLOAD_BYTES", 10)
    providers.step()
    providers.step()
    assert observed_provider() and not list_placement_commands()


def test_the_management_commands_show_and_switch_the_writer(host: Host) -> None:
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("placement_sync", stdout=out)
    assert "its agent writes for this host and is sent the differences" in out.getvalue()
    assert count_new_writes() == 0
    providers.step()
    assert len(list_placement_commands()) == 1
    out = StringIO()
    call_command("placement_writer", stdout=out)
    assert out.getvalue().startswith("agents, epoch 1, since ")
    assert "by olga: closer to the hardware" in out.getvalue()
    out = StringIO()
    call_command("placement_writer", "conductor", reason="audit", stdout=out)
    assert out.getvalue().startswith("conductor, epoch 2, since ")
    with pytest.raises(CommandError, match="at most 500 characters"):
        call_command("placement_writer", "agents", reason="x" * 501)


@pytest.mark.slow
def test_the_console_switches_the_writer_and_lists_hosts_that_cannot_write(host: Host, client: Client) -> None:
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
