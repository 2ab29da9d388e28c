"""Events folded into the state that they tell about: who kept them can say how anything stood at any time. Pure.

Called by who asks how something stood then; a property test holds it against the tables. Events are folded in the order
of their ids: two that change one thing are written under its lock, so the later one has the higher id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from accelerators.domain.diff import FOUND

Fields = dict[str, Any]
State = dict[str, dict[str, Fields]]
"""Kind → uuid → field → value."""

REPRODUCED: Mapping[str, tuple[str, ...]] = {
    "host": ("node", "stale_since"),
    "device": ("state", "returns_to", "drain_to", *FOUND),
    "request": ("project_id", "group", "state", "instance_uuid", "attach_handle", "label"),
    "profile": ("name", "groups", "description"),
    "rule": ("name", "order", "host", "driver", "vendor", "model", "type", "action", "enabled"),
    "command": ("op", "state"),
    "image": ("size", "sha256"),
    "attachment": ("state", "step"),
}
"""Per kind what comes out as it is stored. A request's `group` is the index of its profile's, its `attach_handle` the
handle's id; a command's state is the one it was ordered in until it has ended; times are of whole seconds."""
DEPLOYABLE, BITSTREAM = "deployable ", " bitstream"
"""Of a device also, by name: how many units a deployable has or that it is missing, and what it was programmed with."""
ENDS = frozenset({"device.removed", "request.deleted", "profile.deleted", "rule.deleted", "image.removed"})
"""After these it is not there any more."""


class Told(NamedTuple):
    """Of an event what is folded."""

    action: str
    kind: str
    """Its `subject_type`."""
    subject: str
    host: str
    changes: Mapping[str, Any]


def fold(events: Iterable[Told], state: State | None = None) -> State:
    """What the events, in their order, make of `state`, which is changed; of nothing by default."""
    state = {kind: {} for kind in REPRODUCED} if state is None else state
    for event in events:
        kept = state.get(event.kind)
        if kept is None or not event.subject:
            continue
        if event.action in ENDS:
            kept.pop(event.subject, None)
            continue
        after = {name: pair[1] for name, pair in event.changes.items() if _is_reproduced(event.kind, name)}
        if after or event.subject in kept:
            kept.setdefault(event.subject, {}).update(after)
    return state


def _is_reproduced(kind: str, name: str) -> bool:
    of_device = name.startswith(DEPLOYABLE) or name.endswith(BITSTREAM)
    return name in REPRODUCED[kind] or (kind == "device" and of_device)
