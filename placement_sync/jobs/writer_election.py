"""Decide who writes to Placement: the conductor, or the agents of the hosts that can. One writer per host at a time.

Only the conductor knows the desired and the written state; the writer merely makes the calls. Every change of the
writer raises the epoch, and a writer with an older epoch stops before its next call. While a host's agent has an open
`placement` command, nobody else writes for that host. If the agent has been silent for so long that it must have
stopped by itself, its command is ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec
from django.conf import settings
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.commands import command_queue, placement_delegation
from accelerators.commands.command_queue import CommandOrder, check_reason
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import CommandState, EventSource
from accelerators.models import Command, Host
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.runtime import jobs, pubsub
from accelerators.runtime.after_commit import call_after_commit
from placement_sync import mapping
from placement_sync.agent_writer import ProviderWork
from placement_sync.apply_writes import SyncOutcome
from placement_sync.jobs import repository
from placement_sync.models import Writer, WriterChoice

JOB = "placement"
MAX_PAYLOAD_BYTES = 400_000
"""Largest work that fits into a command, in bytes. A host with more is written by the conductor."""


class WriteTurn(Enum):
    """The component that may write to Placement for a host now."""

    CONDUCTOR = "conductor"
    AGENT = "agent"
    """The agent gets a command if anything has to be written."""
    WAIT = "wait"
    """The agent has an open command; nobody else writes until that command has ended."""


def get_writer() -> Writer:
    """Return the current writer; an unsaved row, the conductor with epoch 0, if the writer was never changed."""
    return Writer.objects.first() or Writer(id=1)


def get_epoch() -> int:
    """Return the epoch of the current writer."""
    return get_writer().epoch


def switch_writer(who: str, actor: str, reason: str = "", source: EventSource = EventSource.PERSON) -> Writer:
    """Make `who` (conductor or agents) the writer, and return the writer. Does nothing if `who` is the writer already.

    Locks the writer's row and records an event. Agents that are writing stop before their next call; commands that no
    agent has taken yet are refused. Raises RefusedError INVALID for an unknown writer or an unusable reason.
    """
    if who not in [*WriterChoice]:
        raise RefusedError(
            RefusalReason.INVALID, f"{who[:64]!r} cannot be the writer: name {' or '.join(WriterChoice)}."
        )
    reason = check_reason(reason)
    with conductor.writing():
        Writer.objects.get_or_create(id=1)
        previous = Writer.objects.select_for_update().get(id=1)
        if previous.who == who:
            return previous
        writer = Writer(id=1, who=who, epoch=previous.epoch + 1, since=Now(), by=actor[:255], reason=reason)
        writer.save()
        changes = {"writer": [previous.who, who], "epoch": [previous.epoch, writer.epoch]}
        conductor.record_event("placement.writer", source, actor, changes=changes, reason=reason)
        queued_commands = Command.objects.filter(
            COMMAND_IS_OPEN, op=placement_delegation.PLACEMENT_OP, state=CommandState.QUEUED
        )
        command_queue.refuse_undelivered_commands(
            [*queued_commands.values_list("id", flat=True)], f"the writer is now: {who}"
        )
        call_after_commit(pubsub.publish, placement_delegation.WRITER_TOPIC)
    return get_writer()


def decide_turns(already_commanded: Mapping[int, bool]) -> dict[int, WriteTurn]:
    """Return who has to write for each host now: WriteTurn by host id.

    `already_commanded` maps a host's id to True if its agent was already sent a command for the present differences. As
    soon as such a command has ended, it is the conductor's turn: it compares the host with Placement and corrects what
    still differs.

    If an agent must have stopped writing, the deadline of its open command is set to now, and the job `commands`, which
    ends the command, is woken. The turn of its host is WAIT until then. Reads with at most three statements; with one
    if the writer was never changed.
    """
    writer = get_writer()
    if not writer.epoch:
        return dict.fromkeys(already_commanded, WriteTurn.CONDUCTOR)
    agents = placement_delegation.get_writer_statuses(already_commanded.keys())
    open_commands = Command.objects.filter(
        COMMAND_IS_OPEN, op=placement_delegation.PLACEMENT_OP, host__in=already_commanded.keys()
    ).order_by("id")
    command_by_host = dict(open_commands.values_list("host", "id"))
    _end_commands([command_id for host, command_id in command_by_host.items() if agents[host].has_stopped_writing])
    turn_by_host = {}
    for host, was_commanded in already_commanded.items():
        agent_writes = writer.who == WriterChoice.AGENTS and not agents[host].reason and not was_commanded
        turn_by_host[host] = (
            WriteTurn.WAIT if host in command_by_host else WriteTurn.AGENT if agent_writes else WriteTurn.CONDUCTOR
        )
    return turn_by_host


def _end_commands(command_ids: Sequence[int]) -> None:
    """Set the deadlines of these unanswered commands to now, and wake the job `commands`, which ends them.

    The caller must know that their agents have stopped by themselves.
    """
    if command_ids:
        with conductor.writing():
            Command.objects.filter(id__in=command_ids, answered_at__isnull=True).update(
                start_by=Now(), end_by=Now(), updated_at=Now()
            )
            call_after_commit(jobs.enqueue_job, command_queue.COMMANDS_JOB)


def delegate_writes(host: Host, outcome: SyncOutcome) -> int:
    """Place a command that makes the host's agent write what differs.

    Returns the command's primary key, or 0 if the work is larger than MAX_PAYLOAD_BYTES: then nothing is placed. The
    command names the current epoch, and contains all desired providers, not only those in `outcome.writes`.
    """
    desired, _ = mapping.compute_desired_providers(repository.load_deployables(host))
    work = ProviderWork(desired, outcome.written, outcome.root, settings.KEYS.placement_endpoint)
    payload = msgspec.json.encode(work)
    if len(payload) > MAX_PAYLOAD_BYTES:
        return 0
    arguments = {"writer": get_epoch(), "payload": payload.decode()}
    order = CommandOrder(
        placement_delegation.PLACEMENT_OP,
        host=host.id,
        arguments=arguments,
        actor=JOB,
        reason=f"writes: {len(outcome.writes)}",
    )
    with conductor.writing():
        command_id: int = command_queue.place_commands([order])[0].pk
    return command_id


def list_hosts_without_writer(hosts: Iterable[Host]) -> list[tuple[str, str]]:
    """Return the name and the reason of each of `hosts` whose agent cannot write to Placement, sorted by name.

    Hosts without an agent are among them. The conductor writes for all hosts in the result.
    """
    name_by_id = {host.id: host.name for host in hosts}
    status_by_host = placement_delegation.get_writer_statuses(name_by_id.keys())
    return sorted((name_by_id[host], hand.reason) for host, hand in status_by_host.items() if hand.reason)
