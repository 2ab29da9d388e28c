"""Tell which hosts can serve a device profile now, and which resource classes and traits profiles can ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelerators.domain import groups
from accelerators.domain.groups import ProfileGroup
from accelerators.models import Attribute, Host
from accelerators.models.devices import build_offered_condition
from accelerators.requests import candidates

MAX_EXAMINED_HOSTS = 100
"""Maximum number of hosts whose free units are counted for one profile."""
MAX_COUNT = 10
"""The number of instances of one host is counted up to this."""
MAX_OFFERED_NAMES = 200
"""Maximum number of resource classes, and of traits, that a form offers."""


@dataclass(frozen=True)
class FittingHosts:
    """The hosts that can serve a profile now, by name: each with the number of instances, at most MAX_COUNT.

    `examined` is the number of hosts whose free units were counted, and `more` says whether there are others that have
    offered devices of the profile's resource classes.
    """

    hosts: list[tuple[str, int]]
    examined: int
    more: bool


@dataclass(frozen=True)
class OfferedNames:
    """The resource classes and traits that a form for device profiles offers, each sorted by name."""

    resource_classes: list[str]
    traits: list[str]


def find_fitting_hosts(wanted_groups: Sequence[ProfileGroup]) -> FittingHosts:
    """Return the hosts that could serve these groups now; reserves nothing.

    The groups must have been checked. Costs two statements; at most MAX_EXAMINED_HOSTS hosts are examined, in the order
    of their names. Placement is not asked: it allocates from the same units after the providers were written.
    """
    classes = {
        key.removeprefix("resources:") for group in wanted_groups for key in group if key.startswith("resources:")
    }
    offering = Host.objects.filter(
        build_offered_condition("devices"),
        devices__deployables__attributes__key="rc",
        devices__deployables__attributes__value__in=classes,
    )
    rows = list(offering.order_by("name").distinct().values_list("pk", "name")[: MAX_EXAMINED_HOSTS + 1])
    examined = rows[:MAX_EXAMINED_HOSTS]
    if not examined or not groups.list_requested_groups(wanted_groups):
        return FittingHosts([], len(examined), False)
    providers_by_host = candidates.find_candidates_by_host([pk for pk, _ in examined])
    counts = [
        (name, candidates.count_possible_choices(wanted_groups, providers_by_host[pk], MAX_COUNT))
        for pk, name in examined
    ]
    return FittingHosts([(name, count) for name, count in counts if count], len(examined), len(rows) > len(examined))


def list_offered_names() -> OfferedNames:
    """Return the resource classes and traits that stored devices have, as far as profiles may ask for them.

    The standard resource classes that profiles may ask for are included. Standard traits are not, because a profile may
    only name traits that begin with CUSTOM_. Costs two statements; at most MAX_OFFERED_NAMES names of each kind.
    """
    found_classes = Attribute.objects.filter(key="rc").order_by("value").values_list("value", flat=True).distinct()
    found_traits = Attribute.objects.filter(key__startswith="trait").order_by("value")
    classes = {*groups.RESOURCE_CLASSES, *found_classes[:MAX_OFFERED_NAMES]}
    traits = found_traits.values_list("value", flat=True).distinct()[:MAX_OFFERED_NAMES]
    return OfferedNames(
        sorted(name for name in classes if _is_allowed({f"resources:{name}": "1"})),
        [name for name in traits if _is_allowed({f"trait:{name}": "required"})],
    )


def _is_allowed(group: ProfileGroup) -> bool:
    """Return whether a profile may have this group."""
    try:
        groups.check_groups([group])
    except groups.GroupError:
        return False
    return True
