"""The job `attachments`: what was asked of `accelerators.workflows.attachments` is done, a step at a time, each in a
transaction.

Intents of the kind `attachment` wake it. What changes Placement is recorded, committed, and tried by the next step
(`claims`), so it is done once, wherever the worker is killed. The amounts there tell whether it happened only as long
as no other attachment of the instance changes them, so one goes at a time (`_in_turn`). Bind and deletion of requests
are in the transaction that records them. Whatever fails before it is attached is undone; what cannot be undone yet is
tried until it is.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Q

from accelerators import outbox
from accelerators.domain.errors import Reason, Refused
from accelerators.models import Attachment
from accelerators.models.attachments import ENDED, AttachmentState
from accelerators.runtime import jobs
from accelerators.workflows import attachment_steps as steps
from accelerators.workflows import attachments
from accelerators.workflows.attachments import Instance, Moved
from placement_sync import allocations
from placement_sync.allocations import Change, Share
from placement_sync.client import CONCURRENT, Away, Conflict, Placement, Rejected
from placement_sync.cloud import session
from placement_sync.nova import client

log = logging.getLogger(__name__)

KIND, JOB = attachments.KIND, "attachments"
TIMEOUT_S = 5.0
PAUSE_S = 1.0
"""How often it is looked whether a host has done its part."""
AT_REST = (AttachmentState.ATTACHED.value, *ENDED)
NOT_THERE = "Nova has no instance {}."
UNSETTLED = ("claiming", "claimed", "returning")
"""In these steps a write is under way, or what it claimed is not bound yet, so `others` does not count it."""
OFF = "Placement is switched off: nothing is claimed there"


class Waits(Exception):
    """Another attachment comes first."""


def run() -> None:
    """The job."""
    jobs.run(JOB, step)


def step() -> bool:
    """One step of the attachment that waits longest; True when there may be more to do."""
    due = outbox.due(KIND, 1)
    if not due:
        if steps.watch():
            return True
        steps.forget()
        return False
    (intent,) = due
    row = Attachment.objects.filter(uuid=intent.key).first()
    try:
        with transaction.atomic():
            if row and row.state not in AT_REST:
                with steps.asked_for(row):
                    _forward(row)
            if row and row.step == "binding":
                outbox.waits(intent, f"{row.host} prepares it", PAUSE_S)
            elif row is None or row.state in AT_REST:
                outbox.done([intent])
    except Away as away:
        _wait_together(str(away))
        return False
    except Moved:
        outbox.failed([intent], "somebody else moved it", 0.0)
    except Waits as wait:
        outbox.waits(intent, str(wait), PAUSE_S)
    except (Conflict, Rejected, Refused) as error:
        outbox.failed([intent], str(error))
    except Exception as error:
        log.exception("attachment %s", intent.key)
        outbox.failed([intent], f"{type(error).__name__}: {error}")
    return True


def look(uuid: str, project: str | None = None) -> Instance:
    """An instance (of `project`), asked of Nova; and whether Placement has it, so that something can be claimed for it.

    Within 4 s. Raises Refused: UNKNOWN; AWAY; CONFLICT when it cannot be, now or as this cloud is configured. Placement
    is not asked about another project's: the answer would tell that it is there.
    """
    keys = settings.KEYS
    if (cloud := session(keys.nova_endpoint)) is None:
        text = "Nova is switched off or not configured: whose instance it is, and where, only Nova can tell."
        raise Refused(Reason.CONFLICT, text)
    try:
        found = _instance(uuid, client.get(cloud, keys.nova_endpoint, f"/servers/{uuid}", {}, client.DEADLINE_S))
        if project not in (None, found.project):
            raise Refused(Reason.UNKNOWN, NOT_THERE.format(uuid))
        if keys.placement_endpoint != "off":
            consumer = Placement(cloud, keys.placement_endpoint, client.DEADLINE_S).consumer(uuid)
            if consumer.generation is None:
                text = f"Placement has nothing allocated to instance {uuid}: nothing can be added to that."
                raise Refused(Reason.CONFLICT, text)
    except (client.Unusable, Away, Conflict, Rejected) as error:
        raise Refused(Reason.AWAY, f"Instance {uuid} cannot be asked for now: {error}. Try again.") from None
    return found


def _instance(uuid: str, answer: Any) -> Instance:
    """Raises Refused UNKNOWN, and Unusable."""
    if answer.status_code == 404:
        raise Refused(Reason.UNKNOWN, NOT_THERE.format(uuid))
    if answer.status_code != 200:
        raise client.Unusable(f"Nova answered {answer.status_code}")
    try:
        found = answer.json()["server"]
        places = (found.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("hypervisor_hostname", "host"))
        task = str(found.get("OS-EXT-STS:task_state") or "")[:64]
        named = frozenset(str(place)[:255] for place in places if place)
        return Instance(uuid, str(found["tenant_id"])[:255], str(found["status"])[:64], named, task)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise client.Unusable("Nova's answer is no server") from None


def _forward(row: Attachment) -> None:
    """The next step. Raises Away, Moved, Waits, Conflict, Rejected, Refused AWAY: the step is to be tried again."""
    try:
        match row.state, row.step:
            case AttachmentState.ASKED, _:
                steps.take_up(row)
            case AttachmentState.ATTACHING, "chosen" | "claiming":
                _claim(row)
            case AttachmentState.ATTACHING, "claimed":
                steps.bind(row)
            case AttachmentState.ATTACHING, _:
                steps.follow(row)
            case _, "":
                steps.free(row)
            case _:
                _give_back(row)
    except Refused as refused:
        if refused.reason is Reason.AWAY:
            raise
        if row.state == AttachmentState.ASKED:
            steps.fail(row, refused.text)
        else:
            steps.undo(row, refused.text)


def _claim(row: Attachment) -> None:
    """What is to be written is recorded by one step and written by the next, until Placement shows it."""
    if (placement := _placement()) is None:
        return attachments.advance(row, AttachmentState.ATTACHING, "claimed", OFF)
    _in_turn(row)
    shares, last = _shares(row), _change(row.claim)
    seen = placement.consumer(str(row.instance))
    change = allocations.claiming(seen, shares, last)
    if change is None:
        raise Refused(Reason.CONFLICT, f"Placement has nothing allocated to instance {row.instance} any more.")
    if not change.nothing and change != last:
        return attachments.advance(row, AttachmentState.ATTACHING, "claiming", claim=msgspec.to_builtins(change))
    if not change.nothing:
        try:
            placement.allocate(seen.uuid, allocations.body(seen, shares, change))
        except (Conflict, Rejected) as error:
            if _overtaken(error):
                raise
            raise Refused(Reason.CONFLICT, str(error)) from None
    said = ", ".join(f"{share.amount} {share.resource_class} of {rp}" for rp, share in sorted(shares.items()))
    attachments.advance(row, AttachmentState.ATTACHING, "claimed", said)


def _give_back(row: Attachment) -> None:
    """The same of what was claimed, or may have been.

    The instance is refused every write while Placement does not want what it has elsewhere: so where nothing is to be
    taken back, and no claim can be under way any more, it ends without one.
    """
    if row.claim is None:
        return steps.end(row)
    if (placement := _placement()) is None:
        return steps.end(row, OFF)
    _in_turn(row)
    shares, last = _shares(row), _change(row.release)
    seen = placement.consumer(str(row.instance))
    change = allocations.releasing(seen, shares, steps.others(row), last)
    if change is not None and change != last:
        state = AttachmentState(row.state)
        return attachments.advance(row, state, "returning", release=msgspec.to_builtins(change))
    if change is not None:
        try:
            placement.allocate(seen.uuid, allocations.body(seen, shares, change))
        except (Conflict, Rejected) as error:
            if _overtaken(error) or not change.nothing or not steps.long_given_up(row):
                raise
            return steps.end(row, "nothing of it is there")
    steps.end(row)


def _in_turn(row: Attachment) -> None:
    """Raises Waits while another attachment of the instance has a write that is not settled. Who has one never waits,
    and only who begins to claim waits for a claim that is to be undone: so none waits for another in a circle."""
    if row.step in UNSETTLED:
        return
    first = Q(step__in=UNSETTLED)
    if row.claim is None:
        first |= Q(state=AttachmentState.UNDOING, claim__isnull=False)
    others = Attachment.objects.filter(first, instance=row.instance, ended_at=None).exclude(pk=row.pk)
    if (uuid := others.values_list("uuid", flat=True).first()) is not None:
        raise Waits(f"attachment {uuid} of this instance comes first")


def _overtaken(error: Conflict | Rejected) -> bool:
    return isinstance(error, Conflict) and error.code == CONCURRENT


def _placement() -> Placement | None:
    endpoint = settings.KEYS.placement_endpoint
    cloud = session(endpoint)
    return cloud and Placement(cloud, endpoint, TIMEOUT_S)


def _shares(row: Attachment) -> dict[str, Share]:
    return msgspec.convert(row.shares, dict[str, Share])


def _change(recorded: Any) -> Change | None:
    return msgspec.convert(recorded, Change) if recorded else None


def _wait_together(error: str) -> None:
    """Who would have to answer is away: nobody needs to find that out again for a while."""
    while due := outbox.due(KIND, 1000):
        outbox.failed(due, error)
