"""Attach accelerators to an instance that is running already, and detach them again.

`order_attachment` and `order_detachment` only write the `Attachment` row, its event and an intent. The job
`attachments` (`placement_sync.jobs.attachments`) then does the work, with the functions of `attachment_steps`. This
module imports nothing that talks to Nova or Placement: the function that looks up an instance there is registered in
`INSTANCE_LOOKUP`.

Only `advance_attachment` changes the state of an attachment. It compares and sets, so of two processes that move the
same attachment the second one gets `ConcurrentUpdateError` and has to read the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import CharField, Q
from django.db.models.functions import Cast

from accelerators import conductor
from accelerators.commands.command_queue import check_reason
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import AcceleratorsError, RefusalReason, RefusedError
from accelerators.domain.libvirt_xml import HeldHandle
from accelerators.domain.states import EventSource, HandleType
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile, Host
from accelerators.models.attachments import ENDED_ATTACHMENT_STATES, AttachmentState
from accelerators.requests import candidates
from accelerators.requests.candidates import ProviderChoice
from accelerators.runtime import database_clock
from accelerators.runtime.registry import Registry

ATTACHMENT_INTENT = "attachment"
"""Kind of the intents for attachments; the key of each is the uuid of the attachment."""
ATTACHABLE_STATUSES = ("ACTIVE", "PAUSED", "SHUTOFF")
"""Instance states of Nova in which a device can be attached."""

_S = AttachmentState
REVERTING_OR_ENDED = (_S.UNDOING.value, _S.DETACHING.value, *ENDED_ATTACHMENT_STATES)
"""States in which an attachment has been taken back, or is being taken back."""


@dataclass(frozen=True)
class NovaInstance:
    """An instance as Nova describes it.

    `host_names` are the names of its host (hypervisor host name and service host). `task_state` is Nova's task state,
    '' if Nova is not working on the instance.
    """

    uuid: str
    project: str
    status: str
    host_names: frozenset[str]
    task_state: str = ""


@dataclass(frozen=True)
class DetachmentForecast:
    """Prediction for the detachment of an attachment.

    `held_units` has the uuids of each request that holds a unit for it, and of the unit's device.
    """

    state: AttachmentState
    held_units: tuple[tuple[UUID, UUID], ...]

    @property
    def changes_something(self) -> bool:
        """Return whether the detachment would change anything."""
        return self.state not in REVERTING_OR_ENDED

    @property
    def held_device_count(self) -> int:
        """Return how many held devices the detachment would change."""
        return len({device for _, device in self.held_units}) if self.changes_something else 0

    @property
    def as_text(self) -> str:
        """Return all that a decision depends on, as a text. If it differs later, the decision is out of date."""
        if not self.changes_something:
            return self.state.value
        held = ", ".join(str(request) for request, _ in self.held_units) or "no unit"
        return f"{'attached' if self.state == _S.ATTACHED else 'not attached yet'}, holding {held}"


INSTANCE_LOOKUP: Registry[Callable[[str, str | None], NovaInstance]] = Registry("instance lookup", single=True)
"""Function that looks up an instance in Nova by its uuid, and checks that Placement can take a claim for it; it answers
in a few seconds. `look_up_instance` calls it.

If a project is given, the instance must belong to it. Raises RefusedError: NOT_FOUND if there is no such instance or it
belongs to another project; UNAVAILABLE if a service does not answer; CONFLICT if nothing can be claimed for the
instance.
"""


class ConcurrentUpdateError(AcceleratorsError):
    """Another process changed the attachment since the caller read it: read the row again."""


def order_attachment(
    instance: UUID,
    caller: Caller,
    *,
    profile: str = "",
    device: UUID | None = None,
    reason: str = "",
    source: EventSource = EventSource.API,
    all_projects: bool = True,
) -> Attachment:
    """Order accelerators for a running instance: those of a device profile, or one unit of a device.

    Returns the new row. Give either `profile` (name or uuid) or `device`. With `all_projects` the caller may name
    instances of every project, otherwise only of their own. The attachment itself happens later, in the job
    `attachments`.

    Nova (and Placement) are asked before the transaction. Raises RefusedError NOT_FOUND, INVALID, CONFLICT, NONE_FREE
    or UNAVAILABLE if it is clear already that the attachment cannot succeed; then nothing is written.
    """
    if bool(profile) == bool(device):
        raise RefusedError(RefusalReason.INVALID, "Give either a device profile or a device to attach.")
    reason = check_reason(reason)
    profile_name = _find_profile(profile).name if profile else ""
    nova_instance = look_up_instance(str(instance), None if all_projects else caller.project_id)
    host = find_host_of_instance(nova_instance)
    row = Attachment(
        instance=instance, project_id=nova_instance.project, host=host.name, profile=profile_name, device=device
    )
    choose_providers_for_attachment(row, host)
    row.actor, row.reason, row.request_id = caller.name[:255], reason, request_id.get()
    row.steps = [_build_history_entry("asked", "")]
    with conductor.writing():
        row.save()
        _record_attachment_event(row, "asked", source, caller.name, {"state": [None, _S.ASKED]}, reason)
        conductor.raise_intents(ATTACHMENT_INTENT, {str(row.uuid): {}})
    return row


def forecast_detachment(row: Attachment) -> DetachmentForecast:
    """Predict what a detachment of this attachment would change now. Costs one statement."""
    return forecast_detachments([row])[row.uuid]


def forecast_detachments(rows: Sequence[Attachment]) -> dict[UUID, DetachmentForecast]:
    """Predict what a detachment of each of these attachments would change now, by their uuids. Costs one statement."""
    attachment_by_request = {request: row.uuid for row in rows for request in row.requests}
    held = AcceleratorRequest.objects.filter(uuid__in=list(attachment_by_request), attach_handle__isnull=False)
    units: dict[UUID, list[tuple[UUID, UUID]]] = {row.uuid: [] for row in rows}
    for request, device in held.order_by("id").values_list("uuid", "attach_handle__deployable__device__uuid"):
        units[attachment_by_request[request]].append((request, device))
    return {row.uuid: DetachmentForecast(AttachmentState(row.state), tuple(units[row.uuid])) for row in rows}


def order_detachment(
    uuid: UUID,
    caller: Caller,
    reason: str = "",
    source: EventSource = EventSource.API,
    all_projects: bool = True,
    seen: str = "",
) -> Attachment:
    """Order an attachment to be detached, or to be undone if it is not attached yet. Returns its row.

    Does nothing if the attachment is ended or is being taken back already. With `all_projects` the caller may name
    attachments of every project, otherwise only of their own. `seen` is `DetachmentForecast.as_text` of the forecast on
    which the caller decided; '' compares nothing. Raises RefusedError: NOT_FOUND; INVALID for a reason that cannot be
    stored; IN_USE if the attachment would change, and is not as it was `seen`; CONFLICT if `uuid` is that of an
    accelerator request: one that Nova made is freed only by Nova.
    """
    reason = check_reason(reason)
    with conductor.writing():
        visible = Q() if all_projects else Q(project_id=caller.project_id)
        row = Attachment.objects.select_for_update().filter(visible, uuid=uuid).first()
        if row is None:
            raise _build_no_attachment_error(uuid, visible)
        if row.state not in REVERTING_OR_ENDED:
            if seen and (present := forecast_detachment(row).as_text) != seen:
                text = f"Attachment {uuid} was {seen} when this was decided; it is {present} now. Look at it again."
                raise RefusedError(RefusalReason.IN_USE, text)
            attached = row.state == _S.ATTACHED
            fault = "" if attached else f"{caller.name} ordered its detachment before it was attached"
            state = _S.DETACHING if attached else _S.UNDOING
            advance_attachment(row, state, "", reason, source=source, actor=caller.name, fault=fault)
            conductor.raise_intents(ATTACHMENT_INTENT, {str(row.uuid): {}})
    return row


def look_up_instance(instance: str, project: str | None = None) -> NovaInstance:
    """Return what Nova knows of an instance.

    Raises RefusedError as the function in `INSTANCE_LOOKUP` does, and CONFLICT if no cloud is configured.
    """
    if not INSTANCE_LOOKUP:
        text = "No cloud is configured (CYBORG_CLOUD), and only Nova knows the instance's project and host."
        raise RefusedError(RefusalReason.CONFLICT, text)
    return INSTANCE_LOOKUP.only()(instance, project)


def find_host_of_instance(instance: NovaInstance) -> Host:
    """Return the host of an instance.

    Raises RefusedError CONFLICT if the instance is in a state in which nothing can be attached, if Nova is working on
    it, or if not exactly one host matches its host names.
    """
    if instance.status not in ATTACHABLE_STATUSES or instance.task_state:
        task_text = f", and Nova is working on it ({instance.task_state})" if instance.task_state else ""
        possible = ", ".join(ATTACHABLE_STATUSES)
        what = f"Instance {instance.uuid} is {instance.status}{task_text}"
        text = f"{what}: devices can only be attached to one that is {possible}."
        raise RefusedError(RefusalReason.CONFLICT, text)
    matching_hosts = Host.objects.filter(Q(name__in=instance.host_names) | Q(node__in=instance.host_names)).order_by(
        "id"
    )[:2]
    if len(matching_hosts) != 1:
        host_text = ", ".join(sorted(instance.host_names)) or "a host that Nova does not show to our service user"
        which = "matches more than one host here" if matching_hosts else "is no host here"
        raise RefusedError(RefusalReason.CONFLICT, f"Instance {instance.uuid} is on {host_text}, which {which}.")
    return matching_hosts[0]


def advance_attachment(
    row: Attachment,
    state: AttachmentState,
    step: str,
    text: str = "",
    *,
    source: EventSource = EventSource.SYSTEM,
    actor: str = "attachments",
    **columns: Any,
) -> None:
    """Move an attachment to `state` and `step`, add the step to its history, set `columns`, and write an event.

    Compare and set: raises ConcurrentUpdateError if state or step in the database differ from those in `row`. Updates
    `row` as well. A history entry of the same name is replaced. `text` is stored in the history entry and as the reason
    of the event.
    """
    before, now = (row.state, row.step), database_clock.now()
    name = step or state.value
    steps = [*(entry for entry in row.steps if entry["step"] != name), _build_history_entry(name, text)]
    values = columns | {"state": state.value, "step": step, "steps": steps, "updated_at": now}
    with conductor.writing():
        if not Attachment.objects.filter(pk=row.pk, state=before[0], step=before[1]).update(**values):
            raise ConcurrentUpdateError
        for field, value in values.items():
            setattr(row, field, value)
        changes = {"state": [before[0], state.value]} if before[0] != state else {}
        _record_attachment_event(row, name, source, actor, changes | {"step": [before[1], step]}, text)


def load_handles(rows: Sequence[Attachment]) -> None:
    """Load the attach handles of all these attachments into `held`, in one statement, so that `get_handles` needs none.

    An attachment that has ended gets an empty list.
    """
    request_uuids = [uuid for row in rows if row.state not in ENDED_ATTACHMENT_STATES for uuid in row.requests]
    held = AcceleratorRequest.objects.filter(uuid__in=request_uuids, attach_handle__isnull=False)
    handle_by_request = {
        request.uuid: request.attach_handle
        for request in (held.select_related("attach_handle__deployable__device") if request_uuids else ())
        if request.attach_handle is not None
    }
    for row in rows:
        row_handles = [handle_by_request[uuid] for uuid in row.requests if uuid in handle_by_request]
        row.held = [
            HeldHandle(str(one.uuid), one.attach_type, one.attach_info, one.deployable.device.hardware_name.full)
            for one in row_handles
        ]


def get_handles(row: Attachment) -> list[HeldHandle]:
    """Return the attach handles that the attachment holds now; one query unless `load_handles` loaded them before."""
    if not hasattr(row, "held"):
        load_handles([row])
    return list(row.held)


def build_intent_key_expression() -> Cast:
    """Return a query expression: the key of an attachment's intent, that is its uuid as text."""
    return Cast("uuid", CharField())


def choose_providers_for_attachment(row: Attachment, host: Host) -> ProviderChoice:
    """Choose the providers on `host` that would serve this attachment now. Reserves and locks nothing.

    Raises RefusedError: NONE_FREE; NOT_FOUND if the profile is gone; INVALID if the profile asks for no accelerator;
    CONFLICT as `refuse_mixed_types` does.
    """
    wanted_groups: Sequence[Mapping[str, str]]
    provider_candidates = candidates.find_candidates(host, row.device)
    if row.device:
        place = f"Device {row.device} on {host.name}"
        if not provider_candidates or not provider_candidates[0].resource_class:
            raise RefusedError(
                RefusalReason.NONE_FREE,
                f"{place} has no free unit: it must be ready, and not all its units may be held.",
            )
        wanted_groups = [{f"resources:{provider_candidates[0].resource_class}": "1"}]
    else:
        place, wanted_groups = f"Host {host.name}", _find_profile(row.profile).groups
    chosen = candidates.choose_providers(wanted_groups, provider_candidates, place)
    if not chosen.providers:
        raise RefusedError(RefusalReason.INVALID, f"Profile {row.profile} asks for no accelerator.")
    refuse_mixed_types(row, chosen.attach_types)
    return chosen


def refuse_mixed_types(row: Attachment, types: Set[str]) -> None:
    """Raise RefusedError CONFLICT if `types` has another type than PCI and the instance holds PCI devices of other
    requests.

    Nova passes PCI devices to an instance only if all its accelerators are PCI devices (contract section 5.1).
    """
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__attach_type=HandleType.PCI)
    if (other_types := sorted(types - {HandleType.PCI.value})) and held.exclude(uuid__in=row.requests).exists():
        text = f"has PCI devices, and Nova does not pass those to an instance together with {', '.join(other_types)}"
        raise RefusedError(RefusalReason.CONFLICT, f"Instance {row.instance} {text}: attach that to another instance.")


def _find_profile(name_or_uuid: str) -> DeviceProfile:
    """Find a device profile by its name, else by its uuid. Raises RefusedError NOT_FOUND."""
    profile = DeviceProfile.objects.filter(name=name_or_uuid.replace("\0", " ")).first()
    if profile is None:
        with suppress(ValueError):
            profile = DeviceProfile.objects.filter(uuid=UUID(name_or_uuid)).first()
    if profile is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"There is no device profile {name_or_uuid[:255]!r}.")
    return profile


def _build_no_attachment_error(uuid: UUID, visible: Q) -> RefusedError:
    """Return the refusal for a `uuid` that no visible attachment has.

    It is CONFLICT if `uuid` is that of a visible request, or of a request of a visible attachment; otherwise NOT_FOUND.
    """
    if holder := Attachment.objects.filter(visible, requests__contains=[uuid]).values_list("uuid", flat=True).first():
        return RefusedError(
            RefusalReason.CONFLICT, f"{uuid} is a request of attachment {holder}: detach that attachment."
        )
    if AcceleratorRequest.objects.filter(visible, uuid=uuid).exists():
        text = f"Request {uuid} was not made by an attachment but for Nova: it is freed when Nova deletes the instance."
        return RefusedError(RefusalReason.CONFLICT, text)
    return RefusedError(RefusalReason.NOT_FOUND, f"There is no attachment {uuid}.")


def _build_history_entry(name: str, text: str) -> dict[str, str]:
    """Build an entry of `Attachment.steps` for a step that is done now; `at` is in UTC."""
    return {"step": name, "at": database_clock.now().isoformat(timespec="seconds"), "text": text}


def _record_attachment_event(
    row: Attachment, verb: str, source: EventSource, actor: str, changes: Mapping[str, Any], reason: str = ""
) -> None:
    """Record the event `attachment.VERB`; `changes` maps each changed field to [before, after]."""
    event_details: Any = {
        "subject": (row.uuid, str(row)),
        "host_name": row.host,
        "changes": dict(changes),
        "reason": reason,
    }
    conductor.record_event(f"attachment.{verb}", source, actor, **event_details)
