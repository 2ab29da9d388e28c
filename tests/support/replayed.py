"""Compare the history with the tables.

`replay_all_events` replays all events with `accelerators.audit.replay`, `read_tables` reads the tables. The two states
must be equal.
"""

from __future__ import annotations

from datetime import UTC
from typing import Any

from accelerators.audit.replay import (
    BITSTREAM_SUFFIX,
    DEPLOYABLE_PREFIX,
    REPRODUCED_FIELDS,
    ReplayedFields,
    ReplayedState,
    ReplayEvent,
    replay_events,
)
from accelerators.models import (
    AcceleratorRequest,
    AdmissionRule,
    Attachment,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Event,
    Host,
    Image,
)


def replay_all_events() -> ReplayedState:
    """Return the state that results from replaying all events in order."""
    columns = Event.objects.order_by("id").values_list("action", "subject_type", "subject", "host", "changes")
    state = replay_events(
        ReplayEvent(action, kind, str(subject or ""), *rest) for action, kind, subject, *rest in columns
    )
    return {
        kind: {uuid: _without_empty_fields(fields) for uuid, fields in found.items()} for kind, found in state.items()
    }


def read_tables() -> ReplayedState:
    """Return the state of the tables, in the same form as `replay_all_events`."""
    models = (Host, Device, AcceleratorRequest, DeviceProfile, AdmissionRule, Command, Image, Attachment)
    return {
        kind: {str(row.uuid): _without_empty_fields(_fields(kind, row)) for row in model.objects.all()}
        for kind, model in zip(REPRODUCED_FIELDS, models, strict=True)
    }


def _fields(kind: str, row: Any) -> ReplayedFields:
    columns = {"group": "group_id", "attach_handle": "attach_handle_id"} if kind == "request" else {}
    found = {name: getattr(row, columns.get(name, name)) for name in REPRODUCED_FIELDS[kind]}
    if kind == "host" and row.stale_since:
        found["stale_since"] = row.stale_since.astimezone(UTC).isoformat(timespec="seconds")
    if kind == "request":
        found["instance_uuid"] = row.instance_uuid and str(row.instance_uuid)
    if kind == "command" and not row.ended_at:
        found["state"] = "preparing" if "wanted" in row.arguments else "queued"
    for part in Deployable.objects.filter(device=row) if kind == "device" else ():
        found[DEPLOYABLE_PREFIX + part.name] = "missing" if part.missing_since else part.num_accelerators
        found[part.name + BITSTREAM_SUFFIX] = part.bitstream_id and str(part.bitstream_id)
    return found


def _without_empty_fields(fields: ReplayedFields) -> ReplayedFields:
    """Return the fields without empty values, because the event of a new object does not contain them."""
    return {name: value for name, value in fields.items() if value not in (None, "")}
