"""Compute from events the state that objects had at a given time, by applying the events in order.

A property test compares the result with the tables. Events must be applied in the order of their ids: two events about
one object are written under that object's lock, so the later one has the higher id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from accelerators.domain.diff import FOUND_EVENT_FIELDS

ReplayedFields = dict[str, Any]
ReplayedState = dict[str, dict[str, ReplayedFields]]
"""Kind → uuid → field → value."""

REPRODUCED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "host": ("node", "stale_since"),
    "device": ("state", "returns_to", "drain_to", *FOUND_EVENT_FIELDS),
    "request": ("project_id", "group", "state", "instance_uuid", "attach_handle", "label"),
    "profile": ("name", "groups", "description"),
    "rule": ("name", "order", "host", "driver", "vendor", "model", "type", "action", "enabled"),
    "command": ("op", "state"),
    "image": ("size", "sha256"),
    "attachment": ("state", "step"),
}
"""Per kind of object the fields that the replay reproduces as they are stored, with these exceptions: the `group` of a
request is the index of the group in its profile, and its `attach_handle` the handle's id; a command has the state in
which it was ordered until it has ended; times are in whole seconds."""
DEPLOYABLE_PREFIX, BITSTREAM_SUFFIX = "deployable ", " bitstream"
"""Prefix and suffix of further fields of a device. `deployable NAME` is its number of units, or that it is missing;
`NAME bitstream` is what the deployable was programmed with."""
REMOVAL_ACTIONS = frozenset(
    {"device.removed", "host.removed", "request.deleted", "profile.deleted", "rule.deleted", "image.removed"}
)
"""Actions after which the object no longer exists."""


class ReplayEvent(NamedTuple):
    """The columns of an event that the replay needs."""

    action: str
    kind: str
    """The event's `subject_type`."""
    subject: str
    host: str
    changes: Mapping[str, Any]


def replay_events(events: Iterable[ReplayEvent], state: ReplayedState | None = None) -> ReplayedState:
    """Apply events, which must be in the order of their ids, to `state`; return it.

    `state` is changed in place; without it, an empty state is created. Events of other kinds than those in
    REPRODUCED_FIELDS, and events without a subject, are ignored. An object appears with the first event that sets one
    of its fields, and disappears with an event of REMOVAL_ACTIONS.
    """
    state = {kind: {} for kind in REPRODUCED_FIELDS} if state is None else state
    for event in events:
        objects = state.get(event.kind)
        if objects is None or not event.subject:
            continue
        if event.action in REMOVAL_ACTIONS:
            objects.pop(event.subject, None)
            continue
        new_values = {name: pair[1] for name, pair in event.changes.items() if _is_reproduced(event.kind, name)}
        if new_values or event.subject in objects:
            objects.setdefault(event.subject, {}).update(new_values)
    return state


def _is_reproduced(kind: str, name: str) -> bool:
    """Return True if the replay reproduces this field of this kind of object."""
    is_device_field = name.startswith(DEPLOYABLE_PREFIX) or name.endswith(BITSTREAM_SUFFIX)
    return name in REPRODUCED_FIELDS[kind] or (kind == "device" and is_device_field)
