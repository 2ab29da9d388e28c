"""The job `attachments`: carry out what `accelerators.workflows.attachments` was asked for, one step per transaction.

Intents of the kind `attachment` wake it. A change of Placement is recorded and committed by one step and sent by the
next (`allocations`), so it happens once, wherever the worker is killed. The amounts in Placement show whether it
happened only while no other attachment of the instance changes them, so one attachment goes at a time (`_check_turn`).
Requests are bound and deleted in the transaction that records it. What fails before it is attached is undone; an undo
that fails is retried until it succeeds.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import Q

from accelerators import outbox
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import Attachment
from accelerators.models.attachments import ENDED, AttachmentState
from accelerators.runtime import jobs
from accelerators.workflows import attachment_steps as steps
from accelerators.workflows import attachments
from accelerators.workflows.attachments import ConcurrentUpdateError, Instance
from placement_sync import allocations
from placement_sync.allocations import Change, Share
from placement_sync.client import (
    CONCURRENT,
    Placement,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import session
from placement_sync.nova import client

log = logging.getLogger(__name__)

KIND, JOB = attachments.KIND, "attachments"
TIMEOUT_S = 5.0
PAUSE_S = 1.0
"""Interval in seconds at which an attachment looks whether its host has finished, or whether its turn has come."""
AT_REST = (AttachmentState.ATTACHED.value, *ENDED)
NOT_THERE = "Nova has no instance {}."
UNSETTLED = ("claiming", "claimed", "returning")
"""In these steps a write is under way, or its claim is not bound yet, so that `attachment_steps.others` does not count
it.
"""
OFF = "Placement is switched off, so nothing is claimed there"


class RetryLaterError(Exception):
    """Another attachment of the same instance has to go first."""


def run() -> None:
    """Run the job."""
    jobs.run(JOB, step)


def step() -> bool:
    """Take one step of the attachment whose intent has waited longest; return True if there may be more to do.

    If nothing is due, detach attachments whose requests were deleted by others, and delete old ended attachments.
    """
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
                outbox.waits(intent, f"{row.host} prepares the device", PAUSE_S)
            elif row is None or row.state in AT_REST:
                outbox.done([intent])
    except PlacementUnavailableError as away:
        _wait_together(str(away))
        return False
    except ConcurrentUpdateError:
        outbox.failed([intent], "another process changed the attachment meanwhile", 0.0)
    except RetryLaterError as wait:
        outbox.waits(intent, str(wait), PAUSE_S)
    except (PlacementConflictError, PlacementRejectedError, RefusedError) as error:
        outbox.failed([intent], str(error))
    except Exception as error:
        log.exception("attachment %s", intent.key)
        outbox.failed([intent], f"{type(error).__name__}: {error}")
    return True


def look(uuid: str, project: str | None = None) -> Instance:
    """Ask Nova for an instance, and check that Placement has allocations of it, to which a claim can be added.

    Takes at most 4 s (2 s per service). Raises RefusedError: UNKNOWN if Nova has no such instance, or it is not of
    `project`; AWAY if a service does not answer; CONFLICT if nothing can be attached now or with this configuration.
    For an instance of another project Placement is not asked: the answer would reveal that the instance exists.
    """
    keys = settings.KEYS
    if (cloud := session(keys.nova_endpoint)) is None:
        text = "Nova is switched off or not configured; without it, the instance's project and host are unknown."
        raise RefusedError(Reason.CONFLICT, text)
    try:
        found = _instance(uuid, client.get(cloud, keys.nova_endpoint, f"/servers/{uuid}", {}, client.DEADLINE_S))
        if project not in (None, found.project):
            raise RefusedError(Reason.UNKNOWN, NOT_THERE.format(uuid))
        if keys.placement_endpoint != "off":
            consumer = Placement(cloud, keys.placement_endpoint, client.DEADLINE_S).consumer(uuid)
            if consumer.generation is None:
                text = (
                    f"Placement has nothing allocated to instance {uuid}, so no device can be added to its allocations."
                )
                raise RefusedError(Reason.CONFLICT, text)
    except (
        client.NovaUnavailableError,
        PlacementUnavailableError,
        PlacementConflictError,
        PlacementRejectedError,
    ) as error:
        raise RefusedError(Reason.AWAY, f"Instance {uuid} cannot be asked for now: {error}. Try again.") from None
    return found


def _instance(uuid: str, answer: Any) -> Instance:
    """Convert Nova's answer into an Instance. Raises RefusedError UNKNOWN and NovaUnavailableError."""
    if answer.status_code == 404:
        raise RefusedError(Reason.UNKNOWN, NOT_THERE.format(uuid))
    if answer.status_code != 200:
        raise client.NovaUnavailableError(f"Nova answered {answer.status_code}")
    try:
        found = answer.json()["server"]
        places = (found.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("hypervisor_hostname", "host"))
        task = str(found.get("OS-EXT-STS:task_state") or "")[:64]
        named = frozenset(str(place)[:255] for place in places if place)
        return Instance(uuid, str(found["tenant_id"])[:255], str(found["status"])[:64], named, task)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise client.NovaUnavailableError("Nova's answer does not describe a server") from None


def _forward(row: Attachment) -> None:
    """Take the next step of an attachment.

    Raises PlacementUnavailableError, ConcurrentUpdateError, RetryLaterError, PlacementConflictError,
    PlacementRejectedError and RefusedError AWAY if the step has to be retried. Any other refusal fails the attachment
    or starts its undo.
    """
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
    except RefusedError as refused:
        if refused.reason is Reason.AWAY:
            raise
        if row.state == AttachmentState.ASKED:
            steps.fail(row, refused.text)
        else:
            steps.undo(row, refused.text)


def _claim(row: Attachment) -> None:
    """Claim the shares in Placement; without Placement, go on without a claim.

    One step records the write and the next one sends it. When Placement shows the shares, the attachment is `claimed`.
    Raises RefusedError CONFLICT if the instance has no allocations or Placement rejects the write;
    PlacementConflictError if another writer was faster; RetryLaterError.
    """
    if (placement := _placement()) is None:
        return attachments.advance(row, AttachmentState.ATTACHING, "claimed", OFF)
    _in_turn(row)
    shares, last = _shares(row), _change(row.claim)
    seen = placement.consumer(str(row.instance))
    change = allocations.claiming(seen, shares, last)
    if change is None:
        raise RefusedError(Reason.CONFLICT, f"Placement has nothing allocated to instance {row.instance} any more.")
    if not change.nothing and change != last:
        return attachments.advance(row, AttachmentState.ATTACHING, "claiming", claim=msgspec.to_builtins(change))
    if not change.nothing:
        try:
            placement.allocate(seen.uuid, allocations.body(seen, shares, change))
        except (PlacementConflictError, PlacementRejectedError) as error:
            if _overtaken(error):
                raise
            raise RefusedError(Reason.CONFLICT, str(error)) from None
    said = ", ".join(f"{share.amount} {share.resource_class} of {rp}" for rp, share in sorted(shares.items()))
    attachments.advance(row, AttachmentState.ATTACHING, "claimed", said)


def _give_back(row: Attachment) -> None:
    """Release the shares in Placement that were claimed, or may have been, and end the attachment.

    One step records the write and the next one sends it. Nothing is written if no claim was recorded or Placement is
    switched off.

    While Placement rejects what the instance has elsewhere, it refuses every write for the instance. So if nothing has
    to be released, and no claim can be under way any more (`long_given_up`), the attachment ends without a write.
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
        except (PlacementConflictError, PlacementRejectedError) as error:
            if _overtaken(error) or not change.nothing or not steps.long_given_up(row):
                raise
            return steps.end(row, "Placement has nothing of it")
    steps.end(row)


def _in_turn(row: Attachment) -> None:
    """Raise RetryLaterError while another attachment of the instance has a write that is not settled.

    An attachment with an unsettled write never waits; only one that begins to claim waits for a claim that has to be
    undone. So attachments cannot wait for each other in a circle.
    """
    if row.step in UNSETTLED:
        return
    first = Q(step__in=UNSETTLED)
    if row.claim is None:
        first |= Q(state=AttachmentState.UNDOING, claim__isnull=False)
    others = Attachment.objects.filter(first, instance=row.instance, ended_at=None).exclude(pk=row.pk)
    if (uuid := others.values_list("uuid", flat=True).first()) is not None:
        raise RetryLaterError(f"attachment {uuid} of this instance has to finish first")


def _overtaken(error: PlacementConflictError | PlacementRejectedError) -> bool:
    """Whether another writer changed the consumer first."""
    return isinstance(error, PlacementConflictError) and error.code == CONCURRENT


def _placement() -> Placement | None:
    """Return a client of Placement, or None if it is switched off or no cloud is configured."""
    endpoint = settings.KEYS.placement_endpoint
    cloud = session(endpoint)
    return cloud and Placement(cloud, endpoint, TIMEOUT_S)


def _shares(row: Attachment) -> dict[str, Share]:
    return msgspec.convert(row.shares, dict[str, Share])


def _change(recorded: Any) -> Change | None:
    return msgspec.convert(recorded, Change) if recorded else None


def _wait_together(error: str) -> None:
    """Record the failure for all due intents, so that they back off together while the service is away."""
    while due := outbox.due(KIND, 1000):
        outbox.failed(due, error)
