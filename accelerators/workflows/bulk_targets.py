"""What a bulk action needs to know about an action on objects that are not devices.

`bulk_detachments` and `bulk_labels` each declare one `TargetAction`; `bulk_actions` uses them like its own actions on
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from accelerators.devices.lifecycle import ActionResult
from accelerators.domain.caller import Caller
from accelerators.domain.states import BulkTarget, DeviceOutcome, EventSource
from accelerators.models import Bulk, BulkItem

MAX_HOSTS_NAMED = 5
"""Maximum number of hosts that the text of a forecast names; the others are counted."""


@dataclass(frozen=True)
class BulkForecast:
    """Predicted outcome for one object, or for `number` objects of a set with the same outcome.

    `held` is True if the action concerns what one of our own requests holds; other holder checks are not made. For a
    command that is not destructive it is always False. `unreachable_hosts` are the hosts whose agents `text` says
    to take no commands now.
    """

    outcome: DeviceOutcome
    text: str
    held: bool
    number: int = 1
    unreachable_hosts: tuple[str, ...] = ()

    def name_hosts(self, hosts: Collection[str]) -> BulkForecast:
        """Return a copy without `unreachable_hosts` whose text names these hosts instead, at most MAX_HOSTS_NAMED."""
        if not hosts:
            return self
        words, left = sorted(hosts)[:MAX_HOSTS_NAMED], len(hosts) - MAX_HOSTS_NAMED
        named = ", ".join(words) + (f" and {left} more" if left > 0 else "")
        noun = "host" if len(hosts) == 1 else "hosts"
        return replace(self, text=f"{self.text} ({noun} {named})", unreachable_hosts=())


@dataclass(frozen=True)
class InstanceReach:
    """The instances that have the objects of a set, and the units that requests hold for the objects which would be
    changed."""

    instances: int
    units: int


@dataclass(frozen=True)
class TargetAction:
    """An action on objects of one kind.

    `build_items` yields an item, which is not stored yet, for each object of a query set, in the order in which the
    objects are locked. `predict` returns a forecast for each of these items. `apply` carries the action out for each of
    these items in one transaction and returns a result for each; a refusal of one object stops no other.
    `query_objects` returns the objects with these uuids that still exist. `count_reach` counts the instances and units
    of a draft. None of them calls another service.
    """

    target: BulkTarget
    build_items: Callable[[Bulk, QuerySet[Any]], Iterator[BulkItem]]
    predict: Callable[[Bulk, Sequence[BulkItem]], list[BulkForecast]]
    apply: Callable[[Bulk, Sequence[BulkItem], Caller, EventSource], list[ActionResult]]
    query_objects: Callable[[Bulk, Collection[UUID]], QuerySet[Any]]
    count_reach: Callable[[Bulk], InstanceReach]
