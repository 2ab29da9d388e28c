"""The job `attachments`: attach and detach what `accelerators.workflows.attachment_orders` has stored, step by step.

Intents of the kind `attachment` wake it. Placement and Nova are called while no transaction is open. A change of
Placement is recorded and committed by one step and sent by the next (`allocations`), so it happens once, wherever the
worker is killed. The amounts in Placement show whether it has happened, but only while no other attachment of the same
instance changes them; therefore only one attachment of an instance proceeds at a time (`_check_turn`). Requests are
bound and deleted in the transaction that records the step. An attachment that fails before it is attached is undone; an
undo that fails is retried until it succeeds.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from django.conf import settings
from django.db.models import Q

from accelerators import outbox
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import Attachment
from accelerators.models.attachments import ENDED_ATTACHMENT_STATES, AttachmentState
from accelerators.runtime import jobs
from accelerators.workflows import attachment_orders
from accelerators.workflows import attachment_steps as steps
from accelerators.workflows.attachment_orders import ConcurrentUpdateError, NovaInstance
from placement_sync import allocations
from placement_sync.allocations import AllocationWrite, ClaimShare
from placement_sync.client import (
    CONCURRENT_UPDATE,
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.errors import PlacementSyncError
from placement_sync.nova import client

log = logging.getLogger(__name__)

KIND, JOB = attachment_orders.ATTACHMENT_INTENT, "attachments"
TIMEOUT_S = 5.0
WAIT_INTERVAL_S = 1.0
"""Interval in seconds at which an attachment looks whether its host has finished, or whether its turn has come."""
RESTING_STATES = (AttachmentState.ATTACHED.value, *ENDED_ATTACHMENT_STATES)
UNKNOWN_INSTANCE_TEXT = "Nova has no instance {}."
UNSETTLED_STEPS = ("claiming", "claimed", "returning")
"""In these steps a write is under way, or its claim is not bound yet, so that
`attachment_steps.count_units_of_other_requests` does not count it.
"""
PLACEMENT_OFF_TEXT = "Placement is switched off, so nothing is claimed there"


class RetryLaterError(PlacementSyncError):
    """Another attachment of the same instance has to go first."""


def run() -> None:
    """Run the job `attachments`: take steps until no attachment has a due intent, or its time slice is over."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Take one step of the attachment whose intent has been due for the longest time.

    Return True if there may be more to do.

    If nothing is due, detach attachments whose requests were deleted by others, and delete old ended attachments. A
    failed step is recorded with its intent and retried later; its error is not raised. If Placement cannot be reached,
    all due intents are postponed.
    """
    due = outbox.load_due_intents(KIND, 1)
    if not due:
        if steps.detach_lost_attachments():
            return True
        steps.delete_old_attachments()
        return False
    (intent,) = due
    row = Attachment.objects.filter(uuid=intent.key).first()
    try:
        if row and row.state not in RESTING_STATES:
            with steps.use_request_id_of(row):
                _take_next_step(row)
        if row and row.step == "binding":
            outbox.postpone_intent(intent, f"{row.host} prepares the device", WAIT_INTERVAL_S)
        elif row is None or row.state in RESTING_STATES:
            outbox.delete_done_intents([intent])
    except PlacementUnavailableError as away:
        _back_off_due_intents(str(away))
        return False
    except ConcurrentUpdateError:
        outbox.record_failures([intent], "another process changed the attachment meanwhile", 0.0)
    except RetryLaterError as wait:
        outbox.postpone_intent(intent, str(wait), WAIT_INTERVAL_S)
    except (PlacementConflictError, PlacementRejectedError, RefusedError) as error:
        outbox.record_failures([intent], str(error))
    except Exception as error:
        log.exception("attachment %s", intent.key)
        outbox.record_failures([intent], f"{type(error).__name__}: {error}")
    return True


def look_up_instance(uuid: str, project: str | None = None) -> NovaInstance:
    """Ask Nova for an instance, and check that Placement has allocations of it, to which a claim can be added.

    Takes at most 4 s (2 s per service). Placement is not asked if it is switched off. Raises RefusedError: NOT_FOUND if
    Nova has no such instance, or it is not of `project` (None: any project); UNAVAILABLE if a service gives no usable
    answer; CONFLICT if Nova is switched off or not configured, or if Placement has nothing allocated to the instance.
    For an instance of another project Placement is not asked: the answer would reveal that the instance exists.
    """
    keys = settings.KEYS
    if (cloud := get_cloud_session(keys.nova_endpoint)) is None:
        text = "Nova is switched off or not configured; without it, the instance's project and host are unknown."
        raise RefusedError(RefusalReason.CONFLICT, text)
    try:
        instance = _parse_instance(
            uuid, client.send_get(cloud, keys.nova_endpoint, f"/servers/{uuid}", {}, client.DEADLINE_S)
        )
        if project not in (None, instance.project):
            raise RefusedError(RefusalReason.NOT_FOUND, UNKNOWN_INSTANCE_TEXT.format(uuid))
        if keys.placement_endpoint != "off":
            consumer = PlacementClient(cloud, keys.placement_endpoint, client.DEADLINE_S).read_consumer(uuid)
            if consumer.generation is None:
                text = (
                    f"Placement has nothing allocated to instance {uuid}, so no device can be added to its allocations."
                )
                raise RefusedError(RefusalReason.CONFLICT, text)
    except (
        client.NovaUnavailableError,
        PlacementUnavailableError,
        PlacementConflictError,
        PlacementRejectedError,
    ) as error:
        raise RefusedError(
            RefusalReason.UNAVAILABLE, f"Instance {uuid} cannot be asked for now: {error}. Try again."
        ) from None
    return instance


def _parse_instance(uuid: str, answer: Any) -> NovaInstance:
    """Convert Nova's answer into a NovaInstance.

    Raises RefusedError NOT_FOUND if the answer is 404, NovaUnavailableError for any other unusable answer.
    """
    if answer.status_code == 404:
        raise RefusedError(RefusalReason.NOT_FOUND, UNKNOWN_INSTANCE_TEXT.format(uuid))
    if answer.status_code != 200:
        raise client.NovaUnavailableError(f"Nova answered {answer.status_code}")
    try:
        server = answer.json()["server"]
        places = (server.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("hypervisor_hostname", "host"))
        task_state = str(server.get("OS-EXT-STS:task_state") or "")[:64]
        host_names = frozenset(str(place)[:255] for place in places if place)
        return NovaInstance(uuid, str(server["tenant_id"])[:255], str(server["status"])[:64], host_names, task_state)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise client.NovaUnavailableError("Nova's answer does not describe a server") from None


def _take_next_step(row: Attachment) -> None:
    """Take the next step of an attachment.

    Raises PlacementUnavailableError, ConcurrentUpdateError, RetryLaterError, PlacementConflictError,
    PlacementRejectedError and RefusedError UNAVAILABLE if the step has to be retried. Any other refusal fails the
    attachment or starts its undo.
    """
    try:
        match row.state, row.step:
            case AttachmentState.ASKED, _:
                steps.start_attachment(row)
            case AttachmentState.ATTACHING, "chosen" | "claiming":
                _claim_shares(row)
            case AttachmentState.ATTACHING, "claimed":
                steps.bind_attachment(row)
            case AttachmentState.ATTACHING, _:
                steps.check_bind_progress(row)
            case _, "":
                steps.release_requests(row)
            case _:
                _release_shares(row)
    except RefusedError as refused:
        if refused.reason is RefusalReason.UNAVAILABLE:
            raise
        if row.state == AttachmentState.ASKED:
            steps.mark_attachment_failed(row, refused.text)
        else:
            steps.start_undoing(row, refused.text)


def _claim_shares(row: Attachment) -> None:
    """Claim the shares in Placement; without Placement, go on without a claim.

    One step records the write and the next one sends it. When Placement shows the shares, the attachment is `claimed`.
    Raises RefusedError CONFLICT if the instance has no allocations or Placement rejects the write;
    PlacementConflictError if another writer was faster; RetryLaterError if another attachment of the instance has to go
    first; PlacementUnavailableError if Placement cannot be reached.
    """
    if (placement := _open_placement()) is None:
        return attachment_orders.advance_attachment(row, AttachmentState.ATTACHING, "claimed", PLACEMENT_OFF_TEXT)
    _check_turn(row)
    shares, recorded = _decode_shares(row), _decode_change(row.claim)
    consumer = placement.read_consumer(str(row.instance))
    change = allocations.plan_claim(consumer, shares, recorded)
    if change is None:
        raise RefusedError(
            RefusalReason.CONFLICT, f"Placement has nothing allocated to instance {row.instance} any more."
        )
    if not change.is_noop and change != recorded:
        return attachment_orders.advance_attachment(
            row, AttachmentState.ATTACHING, "claiming", claim=msgspec.to_builtins(change)
        )
    if not change.is_noop:
        try:
            placement.replace_allocations(consumer.uuid, allocations.build_body(consumer, shares, change))
        except (PlacementConflictError, PlacementRejectedError) as error:
            if _is_concurrent_update(error):
                raise
            raise RefusedError(RefusalReason.CONFLICT, str(error)) from None
    summary = ", ".join(f"{share.amount} {share.resource_class} of {rp}" for rp, share in sorted(shares.items()))
    attachment_orders.advance_attachment(row, AttachmentState.ATTACHING, "claimed", summary)


def _release_shares(row: Attachment) -> None:
    """Release the shares in Placement that were claimed, or may have been, and end the attachment.

    One step records the write and the next one sends it. Nothing is written if no claim was recorded or Placement is
    switched off. Raises RetryLaterError if another attachment of the instance has to go first, and the errors of
    `PlacementClient`.

    A write replaces all allocations of the instance, so Placement rejects it also if an allocation that is not ours is
    invalid. Therefore, if nothing has to be released and no claim can be under way any more (`is_past_pending_writes`),
    a rejected write ends the attachment.
    """
    if row.claim is None:
        return steps.end_attachment(row)
    if (placement := _open_placement()) is None:
        return steps.end_attachment(row, PLACEMENT_OFF_TEXT)
    _check_turn(row)
    shares, recorded = _decode_shares(row), _decode_change(row.release)
    consumer = placement.read_consumer(str(row.instance))
    change = allocations.plan_release(consumer, shares, steps.count_units_of_other_requests(row), recorded)
    if change is not None and change != recorded:
        state = AttachmentState(row.state)
        return attachment_orders.advance_attachment(row, state, "returning", release=msgspec.to_builtins(change))
    if change is not None:
        try:
            placement.replace_allocations(consumer.uuid, allocations.build_body(consumer, shares, change))
        except (PlacementConflictError, PlacementRejectedError) as error:
            if _is_concurrent_update(error) or not change.is_noop or not steps.is_past_pending_writes(row):
                raise
            return steps.end_attachment(row, "Placement has nothing of it")
    steps.end_attachment(row)


def _check_turn(row: Attachment) -> None:
    """Raise RetryLaterError while another attachment of the instance has a write that is not settled.

    An attachment with an unsettled write never waits; only one that begins to claim waits for a claim that has to be
    undone. So attachments cannot wait for each other in a circle.
    """
    if row.step in UNSETTLED_STEPS:
        return
    goes_first = Q(step__in=UNSETTLED_STEPS)
    if row.claim is None:
        goes_first |= Q(state=AttachmentState.UNDOING, claim__isnull=False)
    others = Attachment.objects.filter(goes_first, instance=row.instance, ended_at=None).exclude(pk=row.pk)
    if (uuid := others.values_list("uuid", flat=True).first()) is not None:
        raise RetryLaterError(f"attachment {uuid} of this instance has to finish first")


def _is_concurrent_update(error: PlacementConflictError | PlacementRejectedError) -> bool:
    """Return True if another writer changed the consumer first, so that the step can be tried again."""
    return isinstance(error, PlacementConflictError) and error.code == CONCURRENT_UPDATE


def _open_placement() -> PlacementClient | None:
    """Return a client of Placement, or None if it is switched off or no cloud is configured."""
    endpoint = settings.KEYS.placement_endpoint
    cloud = get_cloud_session(endpoint)
    return cloud and PlacementClient(cloud, endpoint, TIMEOUT_S)


def _decode_shares(row: Attachment) -> dict[str, ClaimShare]:
    """Return the stored shares of an attachment, by the provider's uuid."""
    return msgspec.convert(row.shares, dict[str, ClaimShare])


def _decode_change(recorded: Any) -> AllocationWrite | None:
    """Return a write as it was recorded in `claim` or `release`, None if none was recorded."""
    return msgspec.convert(recorded, AllocationWrite) if recorded else None


def _back_off_due_intents(error: str) -> None:
    """Record the failure for all due `attachment` intents, so that they back off together while Placement is away."""
    while due := outbox.load_due_intents(KIND, 1000):
        outbox.record_failures(due, error)
