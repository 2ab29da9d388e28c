"""Decide who writes to Placement: the conductor, or the agents of the hosts that can. One writer per host at a time.

Only the conductor knows what is desired and what was written; the writer merely makes the calls. Every change of the
writer raises the epoch, and a writer with an older epoch stops before its next call. While a host's agent has an open
`placement` command, nobody else writes for that host. If the agent has been silent for so long that it must have
stopped by itself, its command is ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.commands import placement_delegation, placing
from accelerators.commands.placing import Order, check_reason
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import CommandState, Source
from accelerators.models import Command, Host
from accelerators.models.commands import OPEN
from accelerators.runtime import jobs, pubsub
from placement_sync import mapping
from placement_sync.direct import Work
from placement_sync.jobs import repository
from placement_sync.models import Who, Writer
from placement_sync.sync import Outcome

JOB = "placement"
LONGEST = 400_000
"""Largest work that fits into a command, in bytes. A host with more is written by the conductor."""


class Turn(Enum):
    """Whose turn it is to write for a host."""

    CONDUCTOR = "conductor"
    AGENT = "agent"
    """The agent gets a command if anything has to be written."""
    WAIT = "wait"
    """The agent has an open command; wait until that ends."""


def current() -> Writer:
    """Return the current writer; the conductor with epoch 0 if the writer was never changed."""
    return Writer.objects.first() or Writer(id=1)


def epoch() -> int:
    """Return the epoch of the current writer."""
    return current().epoch


def switch(who: str, by: str, reason: str = "", source: Source = Source.PERSON) -> Writer:
    """Make `who` (conductor or agents) the writer, and return the writer. Does nothing if it is the writer already.

    Locks the writer's row and records an event. Agents that are writing stop before their next call; commands that no
    agent has taken yet are refused. Raises RefusedError INVALID.
    """
    if who not in Who.values:
        raise RefusedError(Reason.INVALID, f"{who[:64]!r} cannot be the writer: name {' or '.join(Who.values)}.")
    reason = check_reason(reason)
    with conductor.writing():
        Writer.objects.get_or_create(id=1)
        before = Writer.objects.select_for_update().get(id=1)
        if before.who == who:
            return before
        now = Writer(id=1, who=who, epoch=before.epoch + 1, since=Now(), by=by[:255], reason=reason)
        now.save()
        changes = {"writer": [before.who, who], "epoch": [before.epoch, now.epoch]}
        conductor.record("placement.writer", source, by, changes=changes, reason=reason)
        untold = Command.objects.filter(OPEN, op=placement_delegation.OP, state=CommandState.QUEUED)
        placing.refuse([*untold.values_list("id", flat=True)], f"the writer is now: {who}")
        transaction.on_commit(partial(pubsub.ring, placement_delegation.TOPIC), robust=True)
    return current()


def turns(told: Mapping[int, bool]) -> dict[int, Turn]:
    """Return whose turn it is for each host (id).

    The value in `already_commanded` is true if the host's agent was already sent a command since the change. Then it is
    the conductor's turn when the command has ended: it looks itself and corrects what is still different.

    Also ends the open commands of silent agents. Reads with at most three statements, one while the writer was never
    changed.
    """
    writer = current()
    if not writer.epoch:
        return dict.fromkeys(told, Turn.CONDUCTOR)
    agents = placement_delegation.hands(told.keys())
    open_ = Command.objects.filter(OPEN, op=placement_delegation.OP, host__in=told.keys()).order_by("id")
    at_it = dict(open_.values_list("host", "id"))
    _give_up([number for host, number in at_it.items() if agents[host].silent])
    found = {}
    for host, was_told in told.items():
        able = writer.who == Who.AGENTS and not agents[host].lacks and not was_told
        found[host] = Turn.WAIT if host in at_it else Turn.AGENT if able else Turn.CONDUCTOR
    return found


def _give_up(numbers: Sequence[int]) -> None:
    """End these commands now: their agents have stopped by themselves."""
    if numbers:
        with conductor.writing():
            Command.objects.filter(id__in=numbers, answered_at__isnull=True).update(
                start_by=Now(), end_by=Now(), updated_at=Now()
            )
            transaction.on_commit(partial(jobs.kick, placing.JOB), robust=True)


def tell(host: Host, seen: Outcome) -> int:
    """Place a command that has the host's agent write what differs.

    Returns the command's number, or 0 if the work is larger than MAX_PAYLOAD_BYTES.
    """
    desired, _ = mapping.desired(repository.parts(host))
    work = Work(desired, seen.written, seen.root, settings.KEYS.placement_endpoint)
    payload = msgspec.json.encode(work)
    if len(payload) > LONGEST:
        return 0
    arguments = {"writer": epoch(), "payload": payload.decode()}
    order = Order(
        placement_delegation.OP, host=host.id, arguments=arguments, actor=JOB, reason=f"writes: {len(seen.writes)}"
    )
    with conductor.writing():
        number: int = placing.place([order])[0].pk
    return number


def left_aside(hosts: Iterable[Host]) -> list[tuple[str, str]]:
    """Return the hosts (name and reason) whose agent cannot write, so that the conductor always writes for them."""
    by_id = {host.id: host.name for host in hosts}
    found = placement_delegation.hands(by_id.keys())
    return sorted((by_id[host], hand.lacks) for host, hand in found.items() if hand.lacks)
