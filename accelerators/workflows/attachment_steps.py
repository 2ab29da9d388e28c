"""The steps of an attachment that only need our database: create its requests, bind them, unbind and delete them.

The job `attachments` (`placement_sync.jobs.attachments`) runs them and does the steps that write to Placement. An
attachment succeeds as a whole or is undone as a whole. Each step and its record are committed in one transaction. Other
services are asked before any row is locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from accelerators import conductor
from accelerators.domain import groups
from accelerators.domain.caller import ADMIN, Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import RequestState
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile
from accelerators.models.attachments import AttachmentState
from accelerators.requests import binding, profiles
from accelerators.requests.binding import Bind
from accelerators.requests.candidates import Choice
from accelerators.workflows.attachments import (
    KIND,
    ConcurrentUpdateError,
    advance,
    choice,
    handles,
    host_of,
    looked_up,
    refuse_mixed,
)

BATCH = 50
REMEMBERED = timedelta(days=30)
"""Ended attachments are deleted after this time; their events stay."""
LATE = timedelta(minutes=10)
"""A write to Placement that was begun longer ago than this cannot be under way any more."""
SERVICE = "service"

_S = AttachmentState

LOST = """
SELECT a.id FROM accelerators_attachment a WHERE a.state = 'attached' AND cardinality(a.requests) > (
  SELECT count(*) FROM accelerators_acceleratorrequest q
  WHERE q.uuid = ANY(a.requests) AND q.state = 'Bound' AND q.instance_uuid = a.instance)
ORDER BY a.id LIMIT %(count)s::bigint
"""
"""Select attached attachments of which a request is gone or no longer Bound to the instance."""


def take_up(row: Attachment) -> None:
    """Choose providers for a new attachment and create its requests in the instance's project (step `chosen`).

    Asks Nova first. Raises RefusedError; then nothing was created.
    """
    host = host_of(looked_up(str(row.instance)))
    with conductor.writing():
        chosen = choice(row, host)
        requests = binding.create(row.profile or _of_class(chosen, _service(row)), _service(row))
        if len(requests) != len(chosen.providers):
            raise RefusedError(Reason.AWAY, f"Profile {row.profile} is being changed: try again.")
        shares = {rp: {"resource_class": name, "amount": amount} for rp, (name, amount) in chosen.shares.items()}
        made = {"requests": requests, "providers": list(chosen.providers), "shares": shares, "host": host.name}
        advance(row, _S.ATTACHING, "chosen", f"requests created for {host.name}: {len(requests)}", **made)


def bind(row: Attachment) -> None:
    """Bind the requests of an attachment in step `claimed`.

    It is attached then, or in step `binding` while its host has to prepare something. Asks Nova first; the module
    `binding` raises the intents that notify Nova. Raises RefusedError: unless the reason is AWAY, the attachment has to
    be undone.
    """
    host = host_of(looked_up(str(row.instance)))
    if host.name != row.host:
        raise RefusedError(
            Reason.CONFLICT, f"Instance {row.instance} has moved from {row.host} to {host.name} meanwhile."
        )
    wanted = [
        Bind(str(request), row.host, str(provider), str(row.instance), row.project_id)
        for request, provider in zip(row.requests, row.providers, strict=True)
    ]
    binding.bind(wanted, _service(row), beside=True)
    # Another request of the instance may have been bound since `choose_providers_for_attachment` checked it.
    refuse_mixed(row, {handle.attach_type for handle in handles(row)})
    follow(row)


def follow(row: Attachment) -> bool:
    """Check the requests of an attachment that is being bound, and mark it attached when all of them are Bound.

    Returns False while its host is still preparing them. Raises RefusedError CONFLICT if a bind failed or requests are
    gone.
    """
    found = {request.uuid: request for request in AcceleratorRequest.objects.filter(uuid__in=row.requests)}
    states = {request.state for request in found.values() if request.instance_uuid == row.instance}
    failed = next((request.fault for request in found.values() if request.state == RequestState.BIND_FAILED), None)
    if failed is not None:
        raise RefusedError(Reason.CONFLICT, failed or "its bind failed")
    if len(found) < len(row.requests) or not states <= {RequestState.BOUND, RequestState.BIND_STARTED}:
        raise RefusedError(Reason.CONFLICT, "Its requests were deleted or unbound while they were being bound.")
    if states == {RequestState.BOUND}:
        advance(row, _S.ATTACHED, "bound", attached_at=datetime.now(UTC))
        return True
    if row.step != "binding":
        advance(row, _S.ATTACHING, "binding", f"{row.host} is preparing the device")
    return False


def undo(row: Attachment, fault: str) -> None:
    """Mark an attachment as failing because of `fault`: the job then takes back the steps that were done."""
    advance(row, _S.UNDOING, "", fault, fault=fault)


def fail(row: Attachment, fault: str) -> None:
    """Mark an attachment of which no step was done yet as failed because of `fault`; this ends it."""
    advance(row, _S.FAILED, "", fault, fault=fault, ended_at=datetime.now(UTC))


def free(row: Attachment) -> None:
    """Unbind and delete the attachment's requests that still exist, and order the host to detach what it made for them.

    Raises ConcurrentUpdateError if somebody else is deleting the requests at this moment.
    """
    with conductor.writing():
        there = AcceleratorRequest.objects.filter(uuid__in=row.requests).order_by("id")
        uuids = [str(uuid) for uuid in there.values_list("uuid", flat=True)]
        try:
            if uuids:
                binding.delete(uuids, _service(row))
        except RefusedError:  # somebody else is deleting the requests at this moment
            raise ConcurrentUpdateError from None
        advance(row, _S(row.state), "freed", f"requests deleted: {len(uuids)}")


def end(row: Attachment, text: str = "") -> None:
    """Mark an attachment whose steps are all taken back as ended: detached, or failed if it never was attached."""
    ended = _S.DETACHED if row.state == _S.DETACHING else _S.FAILED
    advance(row, ended, "", text, ended_at=datetime.now(UTC))


def long_given_up(row: Attachment) -> bool:
    """Return True if taking back began more than LONGEST_WRITE ago.

    Every write to Placement that was sent before that has then either taken effect or never will.
    """
    began = next(one["at"] for one in row.steps if one["step"] == row.state)
    return datetime.fromisoformat(began) < datetime.now(UTC) - LATE


def others(row: Attachment) -> dict[str, int]:
    """Return how many units of each provider the instance's other requests hold.

    Those are the requests of Nova and of other attachments. Only providers of this attachment are counted; the key is
    the provider's uuid.
    """
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__isnull=False)
    there = held.filter(device_rp_uuid__in=row.providers).exclude(uuid__in=row.requests)
    halves: dict[str, int] = {}
    for provider, group in there.values_list("device_rp_uuid", "group"):
        # For a Xilinx FPGA `groups.plan` makes two requests, but one unit is claimed: each counts half.
        halves[str(provider)] = halves.get(str(provider), 0) + (1 if group.get(groups.XILINX) == "required" else 2)
    return {provider: -(-count // 2) for provider, count in halves.items()}


def watch() -> bool:
    """Start to detach attachments whose requests others deleted or unbound, at most BATCH_SIZE; True if there were
    any."""
    lost = [id for (id,) in conductor.cursor().execute(LOST, {"count": BATCH}).fetchall()]
    if lost:
        with conductor.writing():
            for row in Attachment.objects.filter(id__in=lost, state=_S.ATTACHED).order_by("id").select_for_update():
                text = "its requests were deleted or unbound: the instance is deleted or shelved"
                advance(row, _S.DETACHING, "", text, fault=text)
                conductor.intend(KIND, {str(row.uuid): {}})
    return bool(lost)


def forget(now: datetime | None = None) -> None:
    """Delete at most BATCH_SIZE attachments that ended more than ATTACHMENT_RETENTION ago; their events stay."""
    old = Attachment.objects.filter(ended_at__lt=(now or datetime.now(UTC)) - REMEMBERED).order_by("ended_at")
    if uuids := list(old.values_list("pk", flat=True)[:BATCH]):
        with conductor.writing():
            Attachment.objects.filter(pk__in=uuids).delete()
            conductor.forgot("attachment", len(uuids), REMEMBERED)


@contextmanager
def asked_for(row: Attachment) -> Iterator[None]:
    """Give the events written inside this block the id of the API request that ordered the attachment."""
    token = request_id.set(row.request_id)
    try:
        yield
    finally:
        request_id.reset(token)


def _of_class(chosen: Choice, who: Caller) -> str:
    """Return the name of the profile for an attachment that names a device: one unit of the device's resource class.

    The profile is created on first use. Raises RefusedError INVALID if the class cannot be requested, CONFLICT if a
    profile of that name asks for something else.
    """
    ((name, _),) = chosen.shares.values()
    profile, wanted = f"attach-{name}", [{f"resources:{name}": "1"}]
    if not DeviceProfile.objects.filter(name=profile).exists():
        try:
            text = "One unit of a resource class, for attaching a single device."
            profiles.create(profile, groups.check_groups(wanted), text, None, who)
        except groups.GroupError as error:
            raise RefusedError(Reason.INVALID, f"Resource class {name} cannot be requested: {error}") from None
    if DeviceProfile.objects.get(name=profile).groups != wanted:
        raise RefusedError(Reason.CONFLICT, f"Profile {profile} asks for something else than one {name}: rename it.")
    return profile


def _service(row: Attachment) -> Caller:
    """Return a caller with administrator and service rights, named after the actor, in the instance's project."""
    return Caller(row.actor, "", frozenset({ADMIN, SERVICE}), row.project_id, service=True)
