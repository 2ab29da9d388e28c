"""Tell which hosts can serve a device profile now, and which resource classes and traits profiles can ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Exists, OuterRef

from accelerators.domain import groups
from accelerators.domain.groups import ProfileGroup
from accelerators.models import Attribute, Device, Host
from accelerators.models.devices import build_offered_condition
from accelerators.requests import candidates

MAX_COUNT = 10
"""The number of instances of one host is counted up to this."""
MAX_LISTED_HOSTS = 50
"""Maximum number of hosts that are returned by name; the others are counted."""
MAX_OFFERED_NAMES = 200
"""Maximum number of resource classes, and of traits, that a form offers."""


@dataclass(frozen=True)
class FittingHosts:
    """The hosts that can serve a profile now.

    `hosts` has the first MAX_LISTED_HOSTS of them by name: each with the number of instances, at most MAX_COUNT.
    `count` is the number of all of them. `examined` is the number of hosts whose free units were counted: all that have
    offered devices of the profile's resource classes.
    """

    hosts: list[tuple[str, int]]
    count: int
    examined: int


@dataclass(frozen=True)
class OfferedNames:
    """The resource classes and traits that a form for device profiles offers, each sorted by name."""

    resource_classes: list[str]
    traits: list[str]


def find_fitting_hosts(wanted_groups: Sequence[ProfileGroup]) -> FittingHosts:
    """Return the hosts that could serve these groups now; reserves nothing.

    The groups must have been checked. Costs two statements, which read the free handles of every host that offers
    devices of the groups' resource classes; hosts that offer the same are counted together. Placement is not asked: it
    allocates from the same units after the providers were written.
    """
    classes = {
        key.removeprefix("resources:") for group in wanted_groups for key in group if key.startswith("resources:")
    }
    offered_devices = Device.objects.filter(
        build_offered_condition(),
        host=OuterRef("pk"),
        deployables__attributes__key="rc",
        deployables__attributes__value__in=classes,
    )
    examined = Host.objects.filter(Exists(offered_devices)).count()
    if not examined or not groups.list_requested_groups(wanted_groups):
        return FittingHosts([], 0, examined)
    count, hosts = 0, []
    for offer in candidates.find_offers(wanted_groups, MAX_COUNT, MAX_LISTED_HOSTS):
        if choices := candidates.count_possible_choices(wanted_groups, offer.candidates, MAX_COUNT):
            count += offer.count
            hosts += [(name, choices) for name in offer.first_names]
    return FittingHosts(sorted(hosts)[:MAX_LISTED_HOSTS], count, examined)


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
