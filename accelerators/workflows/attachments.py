"""Accelerators for an instance that runs already: asked for, and asked back.

Called by the API, the console and `manage.py attachment`. Each writes the row, its event and an intent, and the job
`attachments` (`placement_sync.jobs.attachments`) does the rest, with `attachment_steps`. What Nova and Placement
know of an instance comes in by `register`, without being imported.

An attachment moves by `advance` alone: compare and set, so whoever comes second looks again.
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
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.libvirt_xml import Handle
from accelerators.domain.states import HandleType, Source
from accelerators.models import AcceleratorRequest, Attachment, DeviceProfile, Host
from accelerators.models.attachments import ENDED, AttachmentState
from accelerators.requests import candidates
from accelerators.requests.candidates import Choice

KIND = "attachment"
"""The kind of its intents; the key is its uuid."""
FITTING = ("ACTIVE", "PAUSED", "SHUTOFF")
"""In these of Nova's states an instance can be given a device."""

_S = AttachmentState
TAKEN_BACK = (_S.UNDOING.value, _S.DETACHING.value, *ENDED)


@dataclass(frozen=True)
class Instance:
    """An instance as Nova knows it. `places`: the names of its host. `task`: what Nova is doing with it, or ''."""

    uuid: str
    project: str
    status: str
    places: frozenset[str]
    task: str = ""


Look = Callable[[str, str | None], Instance]
"""Asks for an instance, of this project if one is named, also whether anything can be claimed for it; answers within a
few seconds. Raises Refused: UNKNOWN, also for another project's; AWAY, CONFLICT."""
_looks: list[Look] = []


class Moved(Exception):
    """Somebody else has moved it meanwhile: look again."""


def register(look: Look) -> None:
    """Ask `look` from now on."""
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
    """Have what a profile (name or uuid) asks for, or one unit of a device, attached to an instance that runs.

    `everyone`: the caller may do so for every project's instances, else for their own project's. Raises Refused,
    UNKNOWN, INVALID, CONFLICT, NONE_FREE, AWAY: as far as it can be told before anything is written.
    """
    if bool(profile) == bool(device):
        raise Refused(Reason.INVALID, "Say what is to be attached: a device profile, or a device.")
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
    """Have it taken back: what is attached, or is about to be. Nothing changes where that is so already.

    Raises Refused: UNKNOWN; CONFLICT for a request that Nova made, which is not ours to take.
    """
    reason = check_reason(reason)
    with conductor.writing():
        own = Q() if everyone else Q(project_id=caller.project_id)
        row = Attachment.objects.select_for_update().filter(own, uuid=uuid).first()
        if row is None:
            raise _no_attachment(uuid, own)
        if row.state not in TAKEN_BACK:
            attached = row.state == _S.ATTACHED
            fault = "" if attached else f"{caller.name} had it detached before it was attached"
            state = _S.DETACHING if attached else _S.UNDOING
            advance(row, state, "", reason, source=source, actor=caller.name, fault=fault)
            conductor.intend(KIND, {str(row.uuid): {}})
    return row


def looked_up(instance: str, project: str | None = None) -> Instance:
    """What Nova knows of it. Raises Refused, as `Look` does."""
    if not _looks:
        text = "No cloud is configured: whose instance it is, and on which host, only Nova can tell (CYBORG_CLOUD)."
        raise Refused(Reason.CONFLICT, text)
    return _looks[0](instance, project)


def host_of(found: Instance) -> Host:
    """The host on which something can be attached to it now. Raises Refused CONFLICT."""
    if found.status not in FITTING or found.task:
        doing = f", and Nova is at it ({found.task})" if found.task else ""
        possible = ", ".join(FITTING)
        text = f"Instance {found.uuid} is {found.status}{doing}: devices are attached to one that is {possible}."
        raise Refused(Reason.CONFLICT, text)
    there = Host.objects.filter(Q(name__in=found.places) | Q(node__in=found.places)).order_by("id")[:2]
    if len(there) != 1:
        named = ", ".join(sorted(found.places)) or "no host that Nova tells our service user of"
        which = "more than one host here" if there else "no host here"
        raise Refused(Reason.CONFLICT, f"Instance {found.uuid} is on {named}, which is {which}.")
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
    """Move it, with what is recorded of it, and an event. Raises Moved when it is not where the caller saw it."""
    was, now = (row.state, row.step), datetime.now(UTC)
    name = step or state.value
    steps = [*(one for one in row.steps if one["step"] != name), _step(name, text)]
    values = columns | {"state": state.value, "step": step, "steps": steps, "updated_at": now}
    with conductor.writing():
        if not Attachment.objects.filter(pk=row.pk, state=was[0], step=was[1]).update(**values):
            raise Moved
        for field, value in values.items():
            setattr(row, field, value)
        changes = {"state": [was[0], state.value]} if was[0] != state else {}
        _record(row, name, source, actor, changes | {"step": [was[1], step]}, text)


def with_handles(rows: Sequence[Attachment]) -> None:
    """Have `handles` of each of them ready, in one statement."""
    wanted = [uuid for row in rows if row.state not in ENDED for uuid in row.requests]
    held = AcceleratorRequest.objects.filter(uuid__in=wanted, attach_handle__isnull=False)
    found = {one.uuid: one.attach_handle for one in held.select_related("attach_handle")} if wanted else {}
    for row in rows:
        there = [found[uuid] for uuid in row.requests if uuid in found]
        row.held = [Handle(str(one.uuid), one.attach_type, one.attach_info) for one in there]


def handles(row: Attachment) -> list[Handle]:
    """What it holds now."""
    if not hasattr(row, "held"):
        with_handles([row])
    return list(row.held)


def as_key() -> Cast:
    """For queries of attachments: the key of its intent."""
    return Cast("uuid", CharField())


def choice(row: Attachment, host: Host) -> Choice:
    """What of the host it would be given now. Raises Refused NONE_FREE, INVALID, CONFLICT."""
    wanted: Sequence[Mapping[str, str]]
    there = candidates.of(host, row.device)
    if row.device:
        where = f"Device {row.device} on {host.name}"
        if not there or not there[0].resource_class:
            raise Refused(Reason.NONE_FREE, f"{where} has none free: it has to be ready there, and not all held.")
        wanted = [{f"resources:{there[0].resource_class}": "1"}]
    else:
        where, wanted = f"Host {host.name}", _profile(row.profile).groups
    chosen = candidates.choose(wanted, there, where)
    if not chosen.providers:
        raise Refused(Reason.INVALID, f"Profile {row.profile} asks for no accelerator.")
    refuse_mixed(row, chosen.types)
    return chosen


def refuse_mixed(row: Attachment, types: Set[str]) -> None:
    """Nova passes an instance's PCI devices on only while it has nothing else (contract section 5.1). Raises Refused
    CONFLICT where it has some beside this attachment's."""
    held = AcceleratorRequest.objects.filter(instance_uuid=row.instance, attach_handle__attach_type=HandleType.PCI)
    if (other := sorted(types - {HandleType.PCI.value})) and held.exclude(uuid__in=row.requests).exists():
        text = f"has PCI devices, which Nova would not give it at its next start beside {', '.join(other)}"
        raise Refused(Reason.CONFLICT, f"Instance {row.instance} {text}: attach that to another instance.")


def _profile(named: str) -> DeviceProfile:
    found = DeviceProfile.objects.filter(name=named.replace("\0", " ")).first()
    if found is None:
        with suppress(ValueError):
            found = DeviceProfile.objects.filter(uuid=UUID(named)).first()
    if found is None:
        raise Refused(Reason.UNKNOWN, f"There is no device profile {named[:255]!r}.")
    return found


def _no_attachment(uuid: UUID, own: Q) -> Refused:
    if holder := Attachment.objects.filter(own, requests__contains=[uuid]).values_list("uuid", flat=True).first():
        return Refused(Reason.CONFLICT, f"{uuid} is a request of attachment {holder}: detach that.")
    if AcceleratorRequest.objects.filter(own, uuid=uuid).exists():
        text = f"Request {uuid} was not made by an attachment but for Nova: it is freed when Nova deletes the instance."
        return Refused(Reason.CONFLICT, text)
    return Refused(Reason.UNKNOWN, f"There is no attachment {uuid}.")


def _step(name: str, text: str) -> dict[str, str]:
    return {"step": name, "at": datetime.now(UTC).isoformat(timespec="seconds"), "text": text}


def _record(
    row: Attachment, verb: str, source: Source, actor: str, changes: Mapping[str, Any], reason: str = ""
) -> None:
    about: Any = {"subject": (row.uuid, str(row)), "host_name": row.host, "changes": dict(changes), "reason": reason}
    conductor.record(f"attachment.{verb}", source, actor, **about)
