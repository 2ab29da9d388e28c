"""The steps of an attachment that only need our database: create its requests, bind them, unbind and delete them.

The job `attachments` (`placement_sync.jobs.attachments`) runs them and does the steps that write to Placement. An
attachment succeeds as a whole or is undone as a whole. Each step and its record are committed in one transaction. Other
services are asked before any row is locked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import OuterRef

from accelerators import conductor
from accelerators.domain import groups
from accelerators.domain.caller import ADMIN_ROLE, Caller, request_id
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import RequestState
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile
from accelerators.models.attachments import HOLDS_ACCELERATORS, AttachmentState
from accelerators.requests import binding, profiles
from accelerators.requests.binding import BindSpec
from accelerators.requests.candidates import ProviderChoice
from accelerators.runtime import database_clock
from accelerators.workflows.attachment_orders import (
    ATTACHMENT_INTENT,
    ConcurrentUpdateError,
    advance_attachment,
    choose_providers_for_attachment,
    find_host_of_instance,
    get_handles,
    look_up_instance,
    refuse_mixed_types,
)

BATCH_SIZE = 50
ATTACHMENT_RETENTION = timedelta(days=30)
"""Ended attachments are deleted after this time; their events stay."""
LONGEST_WRITE = timedelta(minutes=10)
"""A write to Placement that was begun longer ago than this cannot be under way any more."""
SERVICE_ROLE = "service"

_S = AttachmentState


def start_attachment(row: Attachment) -> None:
    """Choose providers for a new attachment and create its requests in the instance's project (step `chosen`).

    Asks Nova first. Raises RefusedError, or ConcurrentUpdateError if another process has changed the attachment; then
    nothing was created.
    """
    host = find_host_of_instance(look_up_instance(str(row.instance)))
    with conductor.writing():
        chosen = choose_providers_for_attachment(row, host)
        requests = binding.create_requests(
            row.profile or _ensure_class_profile(chosen, _build_service_caller(row)), _build_service_caller(row)
        )
        if len(requests) != len(chosen.providers):
            raise RefusedError(RefusalReason.UNAVAILABLE, f"Profile {row.profile} is being changed: try again.")
        shares = {rp: {"resource_class": name, "amount": amount} for rp, (name, amount) in chosen.shares.items()}
        advance_attachment(
            row,
            _S.ATTACHING,
            "chosen",
            f"requests created for {host.name}: {len(requests)}",
            requests=requests,
            providers=list(chosen.providers),
            shares=shares,
            host=host.name,
        )


def bind_attachment(row: Attachment) -> None:
    """Bind the requests of an attachment in step `claimed`.

    It is attached then, or in step `binding` while its host has to prepare something. Asks Nova first; the module
    `binding` raises the intents that notify Nova. Raises RefusedError: unless the reason is UNAVAILABLE, the
    attachment has to be undone.
    """
    host = find_host_of_instance(look_up_instance(str(row.instance)))
    if host.name != row.host:
        raise RefusedError(
            RefusalReason.CONFLICT, f"Instance {row.instance} has moved from {row.host} to {host.name} meanwhile."
        )
    specs = [
        BindSpec(str(request), row.host, str(provider), str(row.instance), row.project_id)
        for request, provider in zip(row.requests, row.providers, strict=True)
    ]
    with conductor.writing():
        binding.bind_requests(specs, _build_service_caller(row), allow_existing=True)
        # Another request of the instance may have been bound since `choose_providers_for_attachment` checked it.
        refuse_mixed_types(row, {handle.attach_type for handle in get_handles(row)})
        check_bind_progress(row)


def check_bind_progress(row: Attachment) -> bool:
    """Check the requests of an attachment that is being bound, and mark it attached when all of them are Bound.

    Returns False while its host is still preparing them. Raises RefusedError CONFLICT if a bind failed or requests are
    gone, ConcurrentUpdateError if another process has changed the attachment.
    """
    requests = {request.uuid: request for request in AcceleratorRequest.objects.filter(uuid__in=row.requests)}
    states = {request.state for request in requests.values() if request.instance_uuid == row.instance}
    bind_fault = next(
        (request.fault for request in requests.values() if request.state == RequestState.BIND_FAILED), None
    )
    if bind_fault is not None:
        raise RefusedError(RefusalReason.CONFLICT, bind_fault or "its bind failed")
    if len(requests) < len(row.requests) or not states <= {RequestState.BOUND, RequestState.BIND_STARTED}:
        raise RefusedError(RefusalReason.CONFLICT, "Its requests were deleted or unbound while they were being bound.")
    if states == {RequestState.BOUND}:
        advance_attachment(row, _S.ATTACHED, "bound", attached_at=database_clock.now())
        return True
    if row.step != "binding":
        advance_attachment(row, _S.ATTACHING, "binding", f"{row.host} is preparing the device")
    return False


def start_undoing(row: Attachment, fault: str) -> None:
    """Move an attachment to the state `undoing` because of `fault`: the job then takes back the steps that were done.

    Raises ConcurrentUpdateError as `advance_attachment` does.
    """
    advance_attachment(row, _S.UNDOING, "", fault, fault=fault)


def mark_attachment_failed(row: Attachment, fault: str) -> None:
    """Move an attachment to the state `failed` because of `fault`, with an event; this ends it, and nothing is undone.

    The caller must know that no step was done yet; this is not checked. Raises ConcurrentUpdateError if its state or
    step has changed in the database.
    """
    advance_attachment(row, _S.FAILED, "", fault, fault=fault, ended_at=database_clock.now())


def release_requests(row: Attachment) -> None:
    """Unbind and delete the attachment's requests that still exist, and order the host to detach what it made for them.

    Raises ConcurrentUpdateError if somebody else is deleting the requests at this moment.
    """
    with conductor.writing():
        remaining = AcceleratorRequest.objects.filter(uuid__in=row.requests).order_by("id")
        uuids = [str(uuid) for uuid in remaining.values_list("uuid", flat=True)]
        try:
            if uuids:
                binding.delete_requests(uuids, _build_service_caller(row))
        except RefusedError:  # somebody else is deleting the requests at this moment
            raise ConcurrentUpdateError from None
        advance_attachment(row, _S(row.state), "freed", f"requests deleted: {len(uuids)}")


def end_attachment(row: Attachment, text: str = "") -> None:
    """End an attachment after all its steps were taken back.

    Its state becomes `detached` if it was `detaching`, otherwise `failed`.
    Raises ConcurrentUpdateError as `advance_attachment` does.
    """
    final_state = _S.DETACHED if row.state == _S.DETACHING else _S.FAILED
    advance_attachment(row, final_state, "", text, ended_at=database_clock.now())


def is_past_pending_writes(row: Attachment) -> bool:
    """Return True if the undo or the detach of an attachment began more than LONGEST_WRITE ago.

    If so, each write to Placement that was sent before the undo or the detach began has taken effect or will never take
    effect. `row` must be in the state `undoing` or `detaching`.
    """
    began = next(entry["at"] for entry in row.steps if entry["step"] == row.state)
    return datetime.fromisoformat(began) < database_clock.now() - LONGEST_WRITE


def count_units_of_other_requests(row: Attachment) -> dict[str, int]:
    """Return how many units of each provider the instance's other requests hold.

    Those are the requests of Nova and of other attachments. Only providers of this attachment are counted; the key is
    the provider's uuid.
    """
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__isnull=False)
    other_requests = held.filter(device_rp_uuid__in=row.providers).exclude(uuid__in=row.requests)
    half_units: dict[str, int] = {}
    for provider, group in other_requests.values_list("device_rp_uuid", "group"):
        # For a Xilinx FPGA `groups.list_requested_groups` makes two requests, but one unit is claimed: each counts
        # half.
        half_units[str(provider)] = half_units.get(str(provider), 0) + (
            1 if group.get(groups.XILINX_TRAIT_KEY) == "required" else 2
        )
    return {provider: -(-count // 2) for provider, count in half_units.items()}


def detach_lost_attachments() -> bool:
    """Start to detach attachments whose requests others deleted or unbound, at most BATCH_SIZE; True if there were
    any."""
    bound = AcceleratorRequest.objects.filter(instance_uuid=OuterRef("instance"), state=RequestState.BOUND).order_by()
    attached = Attachment.objects.filter(HOLDS_ACCELERATORS).order_by("id")
    incomplete = attached.exclude(requests__contained_by=ArraySubquery(bound.values("uuid")))
    if lost := list(incomplete.values_list("id", flat=True)[:BATCH_SIZE]):
        with conductor.writing():
            for row in Attachment.objects.filter(id__in=lost, state=_S.ATTACHED).order_by("id").select_for_update():
                text = "its requests were deleted or unbound: the instance is deleted or shelved"
                advance_attachment(row, _S.DETACHING, "", text, fault=text)
                conductor.raise_intents(ATTACHMENT_INTENT, {str(row.uuid): {}})
    return bool(lost)


def delete_old_attachments(now: datetime | None = None) -> None:
    """Delete at most BATCH_SIZE attachments that ended more than ATTACHMENT_RETENTION ago; their events stay."""
    before = (now or database_clock.now()) - ATTACHMENT_RETENTION
    old = Attachment.objects.filter(ended_at__lt=before).order_by("ended_at")
    if uuids := list(old.values_list("pk", flat=True)[:BATCH_SIZE]):
        with conductor.writing():
            Attachment.objects.filter(pk__in=uuids).delete()
            conductor.record_purge("attachment", len(uuids), ATTACHMENT_RETENTION)


@contextmanager
def use_request_id_of(row: Attachment) -> Iterator[None]:
    """Give the events written inside this block the id of the API request that ordered the attachment."""
    token = request_id.set(row.request_id)
    try:
        yield
    finally:
        request_id.reset(token)


def _ensure_class_profile(chosen: ProviderChoice, caller: Caller) -> str:
    """Return the name of the profile for an attachment that names a device: one unit of the device's resource class.

    The profile is created on first use. Raises RefusedError INVALID if the class cannot be requested, CONFLICT if a
    profile of that name asks for something else.
    """
    ((resource_class, _),) = chosen.shares.values()
    profile_name, wanted_groups = f"attach-{resource_class}", [{f"resources:{resource_class}": "1"}]
    if not DeviceProfile.objects.filter(name=profile_name).exists():
        try:
            text = "One unit of a resource class, for attaching a single device."
            profiles.create_profile(profile_name, groups.check_groups(wanted_groups), text, None, caller)
        except groups.GroupError as error:
            raise RefusedError(
                RefusalReason.INVALID, f"Resource class {resource_class} cannot be requested: {error}"
            ) from None
    if DeviceProfile.objects.get(name=profile_name).groups != wanted_groups:
        raise RefusedError(
            RefusalReason.CONFLICT,
            f"Profile {profile_name} asks for something else than one {resource_class}: rename it.",
        )
    return profile_name


def _build_service_caller(row: Attachment) -> Caller:
    """Return a caller with administrator and service rights, named after the actor, in the instance's project."""
    return Caller(row.actor, "", frozenset({ADMIN_ROLE, SERVICE_ROLE}), row.project_id, service=True)
