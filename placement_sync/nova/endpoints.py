"""Decide whether Nova's answer 404 for an instance is believed.

A Nova of another region or cloud answers 404 for every instance. So 404 means "deleted" only at an address that has
shown an instance which held a request here, or that an administrator has confirmed (`models.NovaEndpoint`). It loses
this trust when it suddenly knows none of the instances (`distrust_endpoint`).
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.db.models.functions import Now

from accelerators import conductor
from accelerators.commands.command_queue import check_reason
from accelerators.domain.states import EventSource
from accelerators.runtime import jobs
from accelerators.runtime.after_commit import call_after_commit
from placement_sync.models import Look, NovaEndpoint, Vanished
from placement_sync.nova.client import DEADLINE_S, NovaUnavailableError, call_with_deadline

JOB = "instances"
"""The job that asks every address, `placement_sync.nova.deleted_instances`."""


class UntrustedEndpointError(NovaUnavailableError):
    """Nova answered 404 at an address that has never shown an instance which holds a request here."""


def resolve_url(session: Any, endpoint: str, deadline_s: float = DEADLINE_S) -> str:
    """Return the address of Nova that requests through the session go to, without a slash at its end.

    The address is `endpoint` if that is not empty, otherwise the one in Keystone's catalogue. To read the catalogue,
    the session may have to log in first; this takes at most `deadline_s`. Raises NovaUnavailableError if there is no
    address.
    """
    from keystoneauth1.exceptions import ClientException

    try:
        url = endpoint or call_with_deadline(partial(session.get_endpoint, service_type="compute"), deadline_s)
    except ClientException as error:
        raise NovaUnavailableError(" ".join(str(error).split())[:300]) from None
    if not url:
        raise NovaUnavailableError("Keystone's catalogue has no service of the type compute")
    return str(url).rstrip("/")


def load_endpoint(url: str) -> NovaEndpoint:
    """Return the row of this address; a new one, which is not trusted, if the address was not used before."""
    return NovaEndpoint.objects.get_or_create(url=url)[0]


def describe_trust(url: str) -> str:
    """Return since when this address is trusted, as a text that differs after the trust was lost; '' if it is not."""
    endpoint = NovaEndpoint.objects.filter(url=url).first()
    return f"{endpoint.proven_at} {endpoint.confirmed_at}" if endpoint and endpoint.is_trusted else ""


def refuse_unless_trusted(url: str) -> None:
    """Raise UntrustedEndpointError unless the answer 404 of this address means that an instance does not exist."""
    endpoint = NovaEndpoint.objects.filter(url=url).first()
    if endpoint is None or not endpoint.is_trusted:
        raise UntrustedEndpointError(
            f"Nova at {url} answered 404, but it has never shown an instance that holds an accelerator here, or shows"
            " none of them any more, so it may be the Nova of another region. Check the region and"
            " CYBORG_NOVA_ENDPOINT, or confirm the address (manage.py nova confirm)"
        )


def record_proof(endpoint: NovaEndpoint) -> None:
    """Store that this address has shown an instance which holds a request here. A second proof changes nothing."""
    if endpoint.proven_at is None:
        NovaEndpoint.objects.filter(pk=endpoint.pk, proven_at=None).update(proven_at=Now(), updated_at=Now())
        endpoint.refresh_from_db(fields=["proven_at"])


def record_proof_at(url: str) -> None:
    """Store that this address has shown an instance which holds a request here, or did so before."""
    record_proof(load_endpoint(url))


def distrust_endpoint(endpoint: NovaEndpoint, count: int, since: datetime) -> None:
    """Stop trusting an address that knows none of the instances: forget its proof and its confirmation.

    `count` instances are unknown to it that it did not list as deleted, the first one since `since`. A confirmation
    that is newer than that stays, and so does the proof. Records the event `nova.distrusted`, once.
    """
    reason = (
        f"Nova at {endpoint.url} has shown none of the instances that hold accelerators, and answered 404 for"
        f" {count} that it did not list as deleted: it may be another Nova, or its database was emptied. Nothing is"
        " freed until it shows one of them or is confirmed"
    )
    with conductor.writing():
        rows = NovaEndpoint.objects.filter(pk=endpoint.pk).exclude(confirmed_at__gt=since)
        if rows.exclude(proven_at=None, confirmed_at=None).update(
            proven_at=None, confirmed_at=None, confirmed_by="", reason="", updated_at=Now()
        ):
            changes = {"endpoint": [endpoint.url, None]}
            subject = (endpoint.uuid, endpoint.url)
            conductor.record_event(
                "nova.distrusted", EventSource.SYSTEM, JOB, subject=subject, changes=changes, reason=reason
            )
    endpoint.refresh_from_db(fields=["proven_at", "confirmed_at", "confirmed_by", "reason"])


def record_unknown_instances(endpoint: NovaEndpoint) -> None:
    """Store for how many instances this address has answered 404 so far while it is not trusted; 0 if it is trusted,
    and for all other addresses.

    The look-ups of one run are a few of all instances, so the stored suspects of all runs are counted.
    """
    count = 0 if endpoint.is_trusted else Vanished.objects.filter(endpoint=endpoint).count()
    NovaEndpoint.objects.exclude(pk=endpoint.pk).exclude(unknown_instances=0).update(unknown_instances=0)
    NovaEndpoint.objects.filter(pk=endpoint.pk).exclude(unknown_instances=count).update(unknown_instances=count)


def confirm_endpoint(uuid: UUID, actor: str, reason: str = "", source: EventSource = EventSource.PERSON) -> bool:
    """Trust the answer 404 of this address from now on, although it has never shown an instance of ours.

    Returns False, and does nothing, if the address is trusted already. Locks the row, records the event
    `nova.confirmed`, and lets the job `instances` run at once. Raises RefusedError INVALID for an unusable reason.
    """
    reason = check_reason(reason)
    with conductor.writing():
        endpoint = NovaEndpoint.objects.select_for_update().get(uuid=uuid)
        if endpoint.is_trusted:
            return False
        NovaEndpoint.objects.filter(pk=endpoint.pk).update(
            confirmed_at=Now(), confirmed_by=actor[:255], reason=reason, unknown_instances=0, updated_at=Now()
        )
        changes = {"endpoint": [None, endpoint.url], "unknown_instances": [endpoint.unknown_instances, 0]}
        _record_decision("nova.confirmed", endpoint, source, actor, changes, reason)
    return True


def withdraw_confirmation(uuid: UUID, actor: str, reason: str = "", source: EventSource = EventSource.PERSON) -> bool:
    """Do not trust the answer 404 of this address any more, until it is proven or confirmed again.

    Requests that were deleted while it was trusted stay deleted. Returns False, and does nothing, if the address is not
    confirmed, or is proven as well. Locks the row, records the event `nova.withdrawn`, and lets the job `instances` run
    at once. Raises RefusedError INVALID for an unusable reason.
    """
    reason = check_reason(reason)
    with conductor.writing():
        endpoint = NovaEndpoint.objects.select_for_update().get(uuid=uuid)
        if endpoint.proven_at or not endpoint.confirmed_at:
            return False
        NovaEndpoint.objects.filter(pk=endpoint.pk).update(
            confirmed_at=None, confirmed_by="", reason="", updated_at=Now()
        )
        changes = {"endpoint": [endpoint.url, None]}
        _record_decision("nova.withdrawn", endpoint, source, actor, changes, reason)
    return True


def _record_decision(
    action: str, endpoint: NovaEndpoint, source: EventSource, actor: str, changes: dict[str, Any], reason: str
) -> None:
    """Record the event of a decision about this address, and let the job `instances` run after the commit."""
    subject = (endpoint.uuid, endpoint.url)
    conductor.record_event(action, source, actor, subject=subject, changes=changes, reason=reason)
    Look.objects.filter(job=JOB).delete()
    if JOB in jobs.JOBS:
        call_after_commit(jobs.enqueue_job, JOB)
