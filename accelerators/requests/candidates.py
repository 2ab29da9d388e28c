"""Find the resource providers of a host that can serve the groups of a device profile.

Nova asks Placement for this before it boots an instance. An instance that runs already can only get devices of its own
host, so they are chosen here. Only devices that are offered (`accelerators.domain.offer`) are considered; the others
are reserved in Placement.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import UUID

from django.db import connection

from accelerators.domain import groups
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import Host
from accelerators.requests.binding_sql import FROM_FREE_HANDLES, OFFERED_COUNT

_HELD_COUNT = """(SELECT count(*) FROM accelerators_acceleratorrequest q
    WHERE q.deployable_id = p.id AND q.attach_handle_id IS NOT NULL)"""
SELECT_CANDIDATES = f"""
SELECT d.host_id, p.rp_uuid::text,
  coalesce((SELECT a.value FROM accelerators_attribute a WHERE a.deployable_id = p.id AND a.key = 'rc'), ''),
  ARRAY(SELECT a.value FROM accelerators_attribute a WHERE a.deployable_id = p.id AND a.key LIKE 'trait%%'),
  {OFFERED_COUNT.format(free="count(*)", held=_HELD_COUNT)}, array_agg(DISTINCT t.attach_type::text)
{FROM_FREE_HANDLES} AND d.host_id = ANY(%(hosts)s::bigint[]) AND (%(device)s::uuid IS NULL OR d.uuid = %(device)s::uuid)
  AND p.rp_uuid IS NOT NULL
GROUP BY d.host_id, p.id ORDER BY p.id
"""
"""Return, for each provider of these hosts with free handles: the host's id, the provider's id, its resource class, its
traits, the number of handles that requests can get, and the attach types of the free handles.

It is raw SQL so that FROM_FREE_HANDLES alone defines which handles are free, and because it is faster: for 16 000
handles of 500 hosts it took 31 ms, and the fastest ORM query that counts in the database 220 ms."""
SELECT_OFFERS = f"""
WITH provider AS MATERIALIZED (
  SELECT d.host_id,
    (SELECT a.value FROM accelerators_attribute a WHERE a.deployable_id = p.id AND a.key = 'rc') AS resource_class,
    CASE WHEN cardinality(%(traits)s::text[]) = 0 THEN '{{}}' ELSE ARRAY(
      SELECT DISTINCT a.value FROM accelerators_attribute a
      WHERE a.deployable_id = p.id AND a.key LIKE 'trait%%' AND a.value = ANY(%(traits)s::text[])) END AS traits,
    least({OFFERED_COUNT.format(free="count(*)", held=_HELD_COUNT)}, %(max_free)s::bigint) AS free
  {FROM_FREE_HANDLES} AND p.rp_uuid IS NOT NULL AND p.id IN (
    SELECT a.deployable_id FROM accelerators_attribute a WHERE a.key = 'rc' AND a.value = ANY(%(classes)s::text[]))
  GROUP BY d.host_id, p.id),
kind AS (
  SELECT host_id, resource_class, traits, free, least(count(*), %(max_providers)s::bigint) AS number
  FROM provider WHERE free > 0 GROUP BY host_id, resource_class, traits, free),
offer AS (
  SELECT host_id, jsonb_agg(jsonb_build_array(resource_class, traits, free, number)
    ORDER BY resource_class, traits, free) AS kinds
  FROM kind GROUP BY host_id)
SELECT o.kinds::text, count(*), (array_agg(h.name ORDER BY h.name))[:%(max_names)s::int]
FROM offer o JOIN accelerators_host h ON h.id = o.host_id GROUP BY o.kinds
"""
"""Return, for all hosts that offer the same of these resource classes: what each of them offers, how many hosts they
are, and the names of the first ones.

The offer is a JSON array of providers that are alike: resource class, those of the asked traits that they have, free
handles, and how many such providers the host has. It is raw SQL for the same reasons.

There is a row for each different offer: a few if the hosts are alike and equally used, at most one for each host with
free units. The database sorts the names of all these hosts, and sends the first ones of each row."""


@dataclass(frozen=True)
class ProviderCandidate:
    """A resource provider with free handles. `provider` is its uuid; `attach_types` are those of its free handles.

    `free` is the number of handles that requests can get, at most what Placement would still allocate.
    """

    provider: str
    resource_class: str
    traits: frozenset[str]
    free: int
    attach_types: frozenset[str]

    def matches_group(self, group: Mapping[str, str]) -> bool:
        """Return whether the resource class and the traits are those that a group asks for; the amount is not checked.

        The group must ask for exactly one resource class. A trait that is not `required` must be absent.
        """
        resource_classes = {key.removeprefix("resources:") for key in group if key.startswith("resources:")}
        wanted_traits = {key.removeprefix("trait:"): value for key, value in group.items() if key.startswith("trait:")}
        return resource_classes == {self.resource_class} and all(
            (name in self.traits) == (value == "required") for name, value in wanted_traits.items()
        )


@dataclass(frozen=True)
class HostOffer:
    """The free providers of hosts that all offer the same for a profile.

    `count` is the number of these hosts, and `first_names` has the first of their names. The candidates have numbers in
    place of their uuids, only those traits that the profile names, and no attach types. There are no more candidates
    and free handles than the profile can use.
    """

    candidates: tuple[ProviderCandidate, ...]
    count: int
    first_names: tuple[str, ...]


@dataclass(frozen=True)
class ProviderChoice:
    """The providers that were chosen for a profile.

    `providers` has one provider per request, in the order of the requests. `shares` maps each provider to its resource
    class and the amount to allocate in Placement. `attach_types` are those of the chosen providers' free handles.
    """

    providers: tuple[str, ...]
    shares: dict[str, tuple[str, int]]
    attach_types: frozenset[str]


def find_candidates(host: Host, device: UUID | None = None) -> list[ProviderCandidate]:
    """Return the providers with free handles on a host, or those of one `device` (uuid) there; one statement.

    Nothing is locked or reserved.
    """
    return find_candidates_by_host([host.pk], device)[host.pk]


def find_candidates_by_host(
    hosts: Collection[int], device: UUID | None = None
) -> defaultdict[int, list[ProviderCandidate]]:
    """Return host id → providers with free handles (of one `device`, by uuid, if it is given); one statement.

    A host without such providers has an empty list. Nothing is locked or reserved.
    """
    candidates_by_host = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(SELECT_CANDIDATES, {"hosts": list(hosts), "device": device})
        for host, provider, resource_class, traits, free, types in cursor.fetchall():
            if free:
                candidates_by_host[host].append(
                    ProviderCandidate(provider, resource_class, frozenset(traits), free, frozenset(types))
                )
    return candidates_by_host


def find_offers(wanted_groups: Sequence[Mapping[str, str]], max_choices: int, max_names: int) -> list[HostOffer]:
    """Return what the hosts offer for these groups, one entry for all hosts that offer the same; one statement.

    Hosts without free providers of the groups' resource classes are left out. The entries have enough providers to
    count up to `max_choices` choices, and at most `max_names` names each. Nothing is locked or reserved.
    """
    keys = {key for group in wanted_groups for key in group}
    parameters: dict[str, Any] = {
        "classes": [key.removeprefix("resources:") for key in keys if key.startswith("resources:")],
        "traits": [key.removeprefix("trait:") for key in keys if key.startswith("trait:")],
        "max_free": max_choices * len(groups.list_requested_groups(wanted_groups)),
        "max_providers": max_choices * len(wanted_groups),  # a choice takes at most one provider for each group
        "max_names": max_names,
    }
    with connection.cursor() as cursor:
        cursor.execute(SELECT_OFFERS, parameters)
        return [
            HostOffer(tuple(_iterate_alike(json.loads(kinds))), count, tuple(first_names))
            for kinds, count, first_names in cursor.fetchall()
        ]


def _iterate_alike(kinds: Sequence[tuple[str, list[str], int, int]]) -> Iterator[ProviderCandidate]:
    """Yield the candidates of an offer, as SELECT_OFFERS returns it; each has a number of its own as its uuid."""
    numbers = count()
    for resource_class, traits, free, number in kinds:
        for _ in range(number):
            yield ProviderCandidate(str(next(numbers)), resource_class, frozenset(traits), free, frozenset())


def choose_providers(
    wanted_groups: Sequence[Mapping[str, str]], candidates: Sequence[ProviderCandidate], place: str
) -> ProviderChoice:
    """Choose a provider for each group of a profile; reserves nothing. Like in Placement, one provider serves the whole
    group.

    The groups that the fewest providers fit are served first. Among the providers with enough free handles, the one
    with the fewest is taken, and of several the one that fits the fewest groups. No other combination is tried, so the
    choice can fail although another combination would fit. Raises RefusedError NONE_FREE for the first group without a
    provider; `place`, such as "Host cmp1", is the subject of its sentence.
    """
    plan = groups.list_requested_groups(wanted_groups)
    chosen, unserved_index = _assign_providers(
        plan, _match_candidates(wanted_groups, candidates), {one.provider: one.free for one in candidates}
    )
    if unserved_index is not None:
        wanted_text = ", ".join(f"{key}={value}" for key, value in sorted(wanted_groups[unserved_index].items()))
        raise RefusedError(
            RefusalReason.NONE_FREE, f"{place} has no free unit that is ready and fits {wanted_text[:300]}."
        )
    shares: dict[str, tuple[str, int]] = {}
    for index, candidate in sorted(chosen.items()):
        amount_before = shares.get(candidate.provider, ("", 0))[1]
        shares[candidate.provider] = (
            candidate.resource_class,
            amount_before + int(wanted_groups[index][f"resources:{candidate.resource_class}"]),
        )
    types = frozenset(kind for one in chosen.values() for kind in one.attach_types)
    return ProviderChoice(tuple(chosen[index].provider for index in plan), shares, types)


def count_possible_choices(
    wanted_groups: Sequence[Mapping[str, str]], candidates: Sequence[ProviderCandidate], maximum: int
) -> int:
    """Return how many times in a row `choose_providers` could serve these groups from these providers, at most
    `maximum`. It is a pure function and reserves nothing.
    """
    plan, fitting, free_handles = (
        groups.list_requested_groups(wanted_groups),
        _match_candidates(wanted_groups, candidates),
        {candidate.provider: candidate.free for candidate in candidates},
    )
    return next((n for n in range(maximum) if _assign_providers(plan, fitting, free_handles)[1] is not None), maximum)


def _match_candidates(
    wanted_groups: Sequence[Mapping[str, str]], candidates: Sequence[ProviderCandidate]
) -> list[list[ProviderCandidate]]:
    """Return, for each group, the providers that have its resource class and traits, those that fit the fewest groups
    first. Providers that fit the same groups stay in their order.

    How many units are free is not checked.
    """
    fitting = [[candidate for candidate in candidates if candidate.matches_group(group)] for group in wanted_groups]
    groups_by_provider = defaultdict(list)
    for index, matching in enumerate(fitting):
        for candidate in matching:
            groups_by_provider[candidate.provider].append(index)

    def count_groups(candidate: ProviderCandidate) -> tuple[int, list[int]]:
        """Return how many groups the provider fits, and which; the latter makes the order independent of the rows'."""
        fitted = groups_by_provider[candidate.provider]
        return len(fitted), fitted

    return [sorted(matching, key=count_groups) for matching in fitting]


def _assign_providers(
    plan: Sequence[int], fitting: Sequence[Sequence[ProviderCandidate]], free_handles: dict[str, int]
) -> tuple[dict[int, ProviderCandidate], int | None]:
    """Choose a provider for each group and subtract its handles from `free_handles` (provider → free handles).

    `plan` has the index of a group once per request, `fitting` has the suitable providers of each group. Returns group
    index → provider, and the index of the first group that no provider can serve, or None. Handles that were subtracted
    before such a group stay subtracted.
    """
    chosen: dict[int, ProviderCandidate] = {}
    for index in sorted(set(plan), key=lambda index: (len(fitting[index]), index)):
        count = plan.count(index)
        sufficient = [candidate for candidate in fitting[index] if free_handles[candidate.provider] >= count]
        if not sufficient:
            return chosen, index
        chosen[index] = min(sufficient, key=lambda one: free_handles[one.provider])
        free_handles[chosen[index].provider] -= count
    return chosen, None
