"""Who calls Placement to write: the conductor, or the agents of the hosts that can. One writer a host at any moment.

What is wanted, and what was written, the conductor alone knows; a writer is only who makes the calls. Used by `tasks`,
the console and `manage.py placement_writer`. Every change of the writer raises the epoch: who holds an older one stops
before its next call. A host whose agent has such a command open is written by nobody else until the command has ended,
and an agent that has fallen silent long enough to have stopped by itself has its command ended for it.
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
from accelerators.domain.errors import Reason, Refused
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
"""Bytes of work that fit into a command; a host with more is written by the conductor."""


class Turn(Enum):
    """Whose turn it is to write for a host."""

    CONDUCTOR = "conductor"
    AGENT = "agent"
    """It is to be told, if anything is to be written."""
    WAIT = "wait"
    """It was told, and is at it."""


def current() -> Writer:
    """Who writes now; the conductor until somebody has decided otherwise."""
    return Writer.objects.first() or Writer(id=1)


def epoch() -> int:
    """The present writer's."""
    return current().epoch


def switch(who: str, by: str, reason: str = "", source: Source = Source.PERSON) -> Writer:
    """Make `who` (conductor or agents) the writer, from now on. Nothing changes when it is already.

    Raises Refused INVALID. What an agent has under way ends before its next call; what it has not taken is withdrawn.
    """
    if who not in Who.values:
        raise Refused(Reason.INVALID, f"Nobody called {who[:64]!r} writes: say {' or '.join(Who.values)}.")
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
    """Whose turn it is at these hosts (ids); True for who was told already what is wanted.

    What an agent was told the conductor looks at when the command has ended, and mends what is not so. Three statements
    at most, one while nobody has ever made agents the writer.
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
    """Their agents have stopped by themselves: they are over."""
    if numbers:
        with conductor.writing():
            Command.objects.filter(id__in=numbers, answered_at__isnull=True).update(
                start_by=Now(), end_by=Now(), updated_at=Now()
            )
            transaction.on_commit(partial(jobs.kick, placing.JOB), robust=True)


def tell(host: Host, seen: Outcome) -> int:
    """Have the host's agent write what differs; the command's number, 0 when it is more than a command holds."""
    desired, _ = mapping.desired(repository.parts(host))
    work = Work(desired, seen.written, seen.root, settings.KEYS.placement_endpoint)
    payload = msgspec.json.encode(work)
    if len(payload) > LONGEST:
        return 0
    arguments = {"writer": epoch(), "payload": payload.decode()}
    order = Order(
        placement_delegation.OP, host=host.id, arguments=arguments, actor=JOB, reason=f"{len(seen.writes)} writes"
    )
    with conductor.writing():
        number: int = placing.place([order])[0].pk
    return number


def left_aside(hosts: Iterable[Host]) -> list[tuple[str, str]]:
    """Hosts (names) whose agent cannot write, and why: the conductor writes for them, whoever else does."""
    by_id = {host.id: host.name for host in hosts}
    found = placement_delegation.hands(by_id.keys())
    return sorted((by_id[host], hand.lacks) for host, hand in found.items() if hand.lacks)
