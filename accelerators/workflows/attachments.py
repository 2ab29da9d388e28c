"""Attach accelerators to an instance that is running already, and detach them again.

`order_attachment` and `order_detachment` only write the `Attachment` row, its event and an intent. The job
`attachments` (`placement_sync.jobs.attachments`) then does the work, with the functions of `attachment_steps`. This
module imports nothing that talks to Nova or Placement: the function that looks up an instance there is passed to
`register_instance_lookup`.

Only `advance_attachment` changes the state of an attachment. It compares and sets, so of two processes that move the
same attachment the second one gets `ConcurrentUpdateError` and has to read the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db.models import CharField, Q
from django.db.models.functions import Cast

from accelerators import conductor
from accelerators.commands.placing import check_reason
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.libvirt_xml import Handle
from accelerators.domain.states import HandleType, Source
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile, Host
from accelerators.models.attachments import ENDED, AttachmentState
from accelerators.requests import candidates
from accelerators.requests.candidates import Choice

KIND = "attachment"
"""Kind of the intents for attachments; the key of each is the uuid of the attachment."""
FITTING = ("ACTIVE", "PAUSED", "SHUTOFF")
"""Instance states of Nova in which a device can be attached."""

_S = AttachmentState
TAKEN_BACK = (_S.UNDOING.value, _S.DETACHING.value, *ENDED)
"""States in which an attachment has been taken back, or is being taken back."""


@dataclass(frozen=True)
class Instance:
    """An instance as Nova describes it.

    `host_names` are the names of its host (hypervisor host name and service host). `task_state` is Nova's task state,
    '' if Nova is not working on the instance.
    """

    uuid: str
    project: str
    status: str
    places: frozenset[str]
    task: str = ""


Look = Callable[[str, str | None], Instance]
"""Look up an instance in Nova by its uuid, and check that Placement can take a claim for it; answers in a few seconds.

If a project is given, the instance must belong to it. Raises RefusedError: UNKNOWN if there is no such instance or it
belongs to another project; AWAY if a service does not answer; CONFLICT if nothing can be claimed for the instance.
"""
_looks: list[Look] = []


class ConcurrentUpdateError(Exception):
    """Another process changed the attachment since the caller read it: read the row again."""


def register(look: Look) -> None:
    """Use `lookup` to look up instances from now on; it replaces the function registered before."""
    _looks[:] = [look]


def ask(
    instance: UUID,
    caller: Caller,
    *,
    profile: str = "",
    device: UUID | None = None,
    reason: str = "",
    source: Source = Source.API,
    everyone: bool = True,
) -> Attachment:
    """Order accelerators for a running instance: those of a device profile, or one unit of a device.

    Returns the new row. Give either `profile` (name or uuid) or `device`. With `all_projects` the caller may name
    instances of every project, otherwise only of their own. The attachment itself happens later, in the job
    `attachments`.

    Nova (and Placement) are asked before the transaction. Raises RefusedError UNKNOWN, INVALID, CONFLICT, NONE_FREE or
    AWAY if it is clear already that the attachment cannot succeed; then nothing is written.
    """
    if bool(profile) == bool(device):
        raise RefusedError(Reason.INVALID, "Give either a device profile or a device to attach.")
    reason = check_reason(reason)
    named = _profile(profile).name if profile else ""
    found = looked_up(str(instance), None if everyone else caller.project_id)
    host = host_of(found)
    row = Attachment(instance=instance, project_id=found.project, host=host.name, profile=named, device=device)
    choice(row, host)
    row.actor, row.reason, row.request_id = caller.name[:255], reason, request_id.get()
    row.steps = [_step("asked", "")]
    with conductor.writing():
        row.save()
        _record(row, "asked", source, caller.name, {"state": [None, _S.ASKED]}, reason)
        conductor.intend(KIND, {str(row.uuid): {}})
    return row


def detach(
    uuid: UUID, caller: Caller, reason: str = "", source: Source = Source.API, everyone: bool = True
) -> Attachment:
    """Order an attachment to be detached, or to be undone if it is not attached yet. Returns its row.

    Does nothing if the attachment is ended or is being taken back already. With `all_projects` the caller may name
    attachments of every project, otherwise only of their own. Raises RefusedError: UNKNOWN; INVALID for a reason that
    cannot be stored; CONFLICT if `uuid` is that of an accelerator request: one that Nova made is freed only by Nova.
    """
    reason = check_reason(reason)
    with conductor.writing():
        own = Q() if everyone else Q(project_id=caller.project_id)
        row = Attachment.objects.select_for_update().filter(own, uuid=uuid).first()
        if row is None:
            raise _no_attachment(uuid, own)
        if row.state not in TAKEN_BACK:
            attached = row.state == _S.ATTACHED
            fault = "" if attached else f"{caller.name} ordered its detachment before it was attached"
            state = _S.DETACHING if attached else _S.UNDOING
            advance(row, state, "", reason, source=source, actor=caller.name, fault=fault)
            conductor.intend(KIND, {str(row.uuid): {}})
    return row


def looked_up(instance: str, project: str | None = None) -> Instance:
    """Return what Nova knows of an instance, by the registered `InstanceLookup`.

    Raises RefusedError as `InstanceLookup` does, and CONFLICT if no cloud is configured.
    """
    if not _looks:
        text = "No cloud is configured (CYBORG_CLOUD), and only Nova knows the instance's project and host."
        raise RefusedError(Reason.CONFLICT, text)
    return _looks[0](instance, project)


def host_of(found: Instance) -> Host:
    """Return the host of an instance.

    Raises RefusedError CONFLICT if the instance is in a state in which nothing can be attached, if Nova is working on
    it, or if not exactly one host matches its host names.
    """
    if found.status not in FITTING or found.task:
        doing = f", and Nova is working on it ({found.task})" if found.task else ""
        possible = ", ".join(FITTING)
        what = f"Instance {found.uuid} is {found.status}{doing}"
        text = f"{what}: devices can only be attached to one that is {possible}."
        raise RefusedError(Reason.CONFLICT, text)
    there = Host.objects.filter(Q(name__in=found.places) | Q(node__in=found.places)).order_by("id")[:2]
    if len(there) != 1:
        named = ", ".join(sorted(found.places)) or "a host that Nova does not show to our service user"
        which = "matches more than one host here" if there else "is no host here"
        raise RefusedError(Reason.CONFLICT, f"Instance {found.uuid} is on {named}, which {which}.")
    return there[0]


def advance(
    row: Attachment,
    state: AttachmentState,
    step: str,
    text: str = "",
    *,
    source: Source = Source.SYSTEM,
    actor: str = "attachments",
    **columns: Any,
) -> None:
    """Move an attachment to `state` and `step`, add the step to its history, set `columns`, and write an event.

    Compare and set: raises ConcurrentUpdateError if state or step in the database differ from those in `row`. Updates
    `row` as well. A history entry of the same name is replaced. `text` is stored in the history entry and as the reason
    of the event.
    """
    was, now = (row.state, row.step), datetime.now(UTC)
    name = step or state.value
    steps = [*(one for one in row.steps if one["step"] != name), _step(name, text)]
    values = columns | {"state": state.value, "step": step, "steps": steps, "updated_at": now}
    with conductor.writing():
        if not Attachment.objects.filter(pk=row.pk, state=was[0], step=was[1]).update(**values):
            raise ConcurrentUpdateError
        for field, value in values.items():
            setattr(row, field, value)
        changes = {"state": [was[0], state.value]} if was[0] != state else {}
        _record(row, name, source, actor, changes | {"step": [was[1], step]}, text)


def with_handles(rows: Sequence[Attachment]) -> None:
    """Load the attach handles of all these attachments in one statement, so that `get_handles` needs no query."""
    wanted = [uuid for row in rows if row.state not in ENDED for uuid in row.requests]
    held = AcceleratorRequest.objects.filter(uuid__in=wanted, attach_handle__isnull=False)
    found = {one.uuid: one.attach_handle for one in held.select_related("attach_handle")} if wanted else {}
    for row in rows:
        there = [found[uuid] for uuid in row.requests if uuid in found]
        row.held = [Handle(str(one.uuid), one.attach_type, one.attach_info) for one in there]


def handles(row: Attachment) -> list[Handle]:
    """Return the attach handles that the attachment holds now; one query unless `load_handles` loaded them before."""
    if not hasattr(row, "held"):
        with_handles([row])
    return list(row.held)


def as_key() -> Cast:
    """Return a query expression: the key of an attachment's intent, that is its uuid as text."""
    return Cast("uuid", CharField())


def choice(row: Attachment, host: Host) -> Choice:
    """Choose the providers on `host` that would serve this attachment now. Reserves and locks nothing.

    Raises RefusedError: NONE_FREE; UNKNOWN if the profile is gone; INVALID if the profile asks for no accelerator;
    CONFLICT as `refuse_mixed_types` does.
    """
    wanted: Sequence[Mapping[str, str]]
    there = candidates.of(host, row.device)
    if row.device:
        where = f"Device {row.device} on {host.name}"
        if not there or not there[0].resource_class:
            raise RefusedError(
                Reason.NONE_FREE, f"{where} has no free unit: it must be ready, and not all its units may be held."
            )
        wanted = [{f"resources:{there[0].resource_class}": "1"}]
    else:
        where, wanted = f"Host {host.name}", _profile(row.profile).groups
    chosen = candidates.choose(wanted, there, where)
    if not chosen.providers:
        raise RefusedError(Reason.INVALID, f"Profile {row.profile} asks for no accelerator.")
    refuse_mixed(row, chosen.types)
    return chosen


def refuse_mixed(row: Attachment, types: Set[str]) -> None:
    """Raise RefusedError CONFLICT if `types` has another type than PCI and the instance holds PCI devices of other
    requests.

    Nova passes PCI devices to an instance only if all its accelerators are PCI devices (contract section 5.1).
    """
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__attach_type=HandleType.PCI)
    if (other := sorted(types - {HandleType.PCI.value})) and held.exclude(uuid__in=row.requests).exists():
        text = f"has PCI devices, and Nova does not pass those to an instance together with {', '.join(other)}"
        raise RefusedError(Reason.CONFLICT, f"Instance {row.instance} {text}: attach that to another instance.")


def _profile(named: str) -> DeviceProfile:
    """Find a device profile by its name, else by its uuid. Raises RefusedError UNKNOWN."""
    found = DeviceProfile.objects.filter(name=named.replace("\0", " ")).first()
    if found is None:
        with suppress(ValueError):
            found = DeviceProfile.objects.filter(uuid=UUID(named)).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, f"There is no device profile {named[:255]!r}.")
    return found


def _no_attachment(uuid: UUID, own: Q) -> RefusedError:
    """Explain why `uuid` cannot be detached: CONFLICT if it is the uuid of a request, otherwise UNKNOWN."""
    if holder := Attachment.objects.filter(own, requests__contains=[uuid]).values_list("uuid", flat=True).first():
        return RefusedError(Reason.CONFLICT, f"{uuid} is a request of attachment {holder}: detach that attachment.")
    if AcceleratorRequest.objects.filter(own, uuid=uuid).exists():
        text = f"Request {uuid} was not made by an attachment but for Nova: it is freed when Nova deletes the instance."
        return RefusedError(Reason.CONFLICT, text)
    return RefusedError(Reason.UNKNOWN, f"There is no attachment {uuid}.")


def _step(name: str, text: str) -> dict[str, str]:
    return {"step": name, "at": datetime.now(UTC).isoformat(timespec="seconds"), "text": text}


def _record(
    row: Attachment, verb: str, source: Source, actor: str, changes: Mapping[str, Any], reason: str = ""
) -> None:
    about: Any = {"subject": (row.uuid, str(row)), "host_name": row.host, "changes": dict(changes), "reason": reason}
    conductor.record(f"attachment.{verb}", source, actor, **about)
