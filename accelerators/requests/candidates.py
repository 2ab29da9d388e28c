"""Find the resource providers of a host that can serve the groups of a device profile.

Nova asks Placement for this before it boots an instance. An instance that runs already can only get devices of its own
host, so they are chosen here. Only devices in state `ready` are considered; the others are reserved in Placement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import connection

from accelerators.domain import groups
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import Host
from accelerators.requests.binding_sql import FREE, IN_OFFER

_HELD = """(SELECT count(*) FROM accelerators_acceleratorrequest q
    WHERE q.deployable_id = p.id AND q.attach_handle_id IS NOT NULL)"""
OF_HOSTS = f"""
SELECT d.host_id, p.rp_uuid::text,
  coalesce((SELECT a.value FROM accelerators_attribute a WHERE a.deployable_id = p.id AND a.key = 'rc'), ''),
  ARRAY(SELECT a.value FROM accelerators_attribute a WHERE a.deployable_id = p.id AND a.key LIKE 'trait%%'),
  {IN_OFFER.format(free="count(*)", held=_HELD)}, array_agg(DISTINCT t.attach_type::text)
{FREE} AND d.host_id = ANY(%(hosts)s::bigint[]) AND (%(device)s::uuid IS NULL OR d.uuid = %(device)s::uuid)
  AND p.rp_uuid IS NOT NULL
GROUP BY d.host_id, p.id ORDER BY p.id
"""
"""Return, for each provider of these hosts with free handles: the host's id, the provider's id, its resource class, its
traits, the number of handles that requests can get, and the attach types of the free handles."""


@dataclass(frozen=True)
class Candidate:
    """A resource provider with free handles. `free` is at most what Placement would still allocate; `attach_types` are
    those of its free handles."""

    provider: str
    resource_class: str
    traits: frozenset[str]
    free: int
    types: frozenset[str]

    def fits(self, group: Mapping[str, str]) -> bool:
        """Return whether the resource class and the traits are those that a group asks for; the amount is not checked.

        The group must ask for exactly one resource class. A trait that is not `required` must be absent.
        """
        named = {key.removeprefix("resources:") for key in group if key.startswith("resources:")}
        wanted = {key.removeprefix("trait:"): value for key, value in group.items() if key.startswith("trait:")}
        return named == {self.resource_class} and all(
            (name in self.traits) == (value == "required") for name, value in wanted.items()
        )


@dataclass(frozen=True)
class Choice:
    """The providers that were chosen for a profile.

    `providers` has one provider per request, in the order of the requests. `shares` maps each provider to its resource
    class and the amount to allocate in Placement. `attach_types` are those of the chosen providers' free handles.
    """

    providers: tuple[str, ...]
    shares: dict[str, tuple[str, int]]
    types: frozenset[str]


def of(host: Host, device: UUID | None = None) -> list[Candidate]:
    """Return the providers with free handles on a host, or those of one `device` there; one statement."""
    return at([host.pk], device)[host.pk]


def at(hosts: Collection[int], device: UUID | None = None) -> defaultdict[int, list[Candidate]]:
    """Return host id → providers with free handles (of one `device` if it is given), for these hosts; one statement."""
    found = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(OF_HOSTS, {"hosts": list(hosts), "device": device})
        for host, provider, name, traits, free, types in cursor.fetchall():
            if free:
                found[host].append(Candidate(provider, name, frozenset(traits), free, frozenset(types)))
    return found


def choose(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate], where: str) -> Choice:
    """Choose a provider for each group of a profile; reserves nothing. Like in Placement, one provider serves the whole
    group.

    Groups that fit the fewest providers are served first. Of the providers that have enough free handles, the one with
    the fewest is taken. No other combination is tried, so the choice can fail although another combination would fit.
    Raises RefusedError NONE_FREE for the first group without a provider; `place`, such as "Host cmp1", is the subject
    of its sentence.
    """
    plan = groups.plan(wanted)
    chosen, without = _take(plan, _fitting(wanted, there), {one.provider: one.free for one in there})
    if without is not None:
        asked = ", ".join(f"{key}={value}" for key, value in sorted(wanted[without].items()))
        raise RefusedError(Reason.NONE_FREE, f"{where} has no free unit that is ready and fits {asked[:300]}.")
    shares: dict[str, tuple[str, int]] = {}
    for index, one in sorted(chosen.items()):
        before = shares.get(one.provider, ("", 0))[1]
        shares[one.provider] = one.resource_class, before + int(wanted[index][f"resources:{one.resource_class}"])
    types = frozenset(kind for one in chosen.values() for kind in one.types)
    return Choice(tuple(chosen[index].provider for index in plan), shares, types)


def room(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate], most: int) -> int:
    """Return how many times in a row `choose_providers` could serve these groups from these providers, at most
    `maximum`."""
    plan, fitting, left = groups.plan(wanted), _fitting(wanted, there), {one.provider: one.free for one in there}
    return next((n for n in range(most) if _take(plan, fitting, left)[1] is not None), most)


def _fitting(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return, for each group, the providers that fit it, whatever the amount."""
    return [[one for one in there if one.fits(group)] for group in wanted]


def _take(
    plan: Sequence[int], fitting: Sequence[Sequence[Candidate]], left: dict[str, int]
) -> tuple[dict[int, Candidate], int | None]:
    """Choose a provider for each group and subtract its handles from `free_handles` (provider → free handles).

    Returns group index → provider, and the index of the first group that no provider can serve, or None.
    """
    chosen: dict[int, Candidate] = {}
    for index in sorted(set(plan), key=lambda index: (len(fitting[index]), index)):
        count = plan.count(index)
        enough = [one for one in fitting[index] if left[one.provider] >= count]
        if not enough:
            return chosen, index
        chosen[index] = min(enough, key=lambda one: left[one.provider])
        left[chosen[index].provider] -= count
    return chosen, None
