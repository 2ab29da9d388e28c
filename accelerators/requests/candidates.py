"""Which parts of a host can serve what a profile's groups ask for. Called by `attachments`, and by the load census.

Nova asks Placement this before it boots an instance; for one that is on its host already there is only that host to
choose from. What is not ready is not offered (Placement has it reserved), so it is not chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from django.db import connection

from accelerators.domain import groups
from accelerators.domain.errors import Reason, Refused
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


@dataclass(frozen=True)
class Candidate:
    """A provider that has some in offer: `free` handles, and no more than Placement would give."""

    provider: str
    resource_class: str
    traits: frozenset[str]
    free: int
    types: frozenset[str]

    def fits(self, group: Mapping[str, str]) -> bool:
        """Whether it is what a group asks for, however many."""
        named = {key.removeprefix("resources:") for key in group if key.startswith("resources:")}
        wanted = {key.removeprefix("trait:"): value for key, value in group.items() if key.startswith("trait:")}
        return named == {self.resource_class} and all(
            (name in self.traits) == (value == "required") for name, value in wanted.items()
        )


@dataclass(frozen=True)
class Choice:
    """`providers`: where each request is to be bound, in their order; `shares`: provider → class and amount, as
    Placement counts; `types`: how what is chosen reaches an instance."""

    providers: tuple[str, ...]
    shares: dict[str, tuple[str, int]]
    types: frozenset[str]


def of(host: Host, device: UUID | None = None) -> list[Candidate]:
    """What is free on a host, or of one device there; one statement."""
    return at([host.pk], device)[host.pk]


def at(hosts: Collection[int], device: UUID | None = None) -> defaultdict[int, list[Candidate]]:
    """What is free on each of these hosts; one statement."""
    found = defaultdict(list)
    with connection.cursor() as cursor:
        cursor.execute(OF_HOSTS, {"hosts": list(hosts), "device": device})
        for host, provider, name, traits, free, types in cursor.fetchall():
            if free:
                found[host].append(Candidate(provider, name, frozenset(traits), free, frozenset(types)))
    return found


def choose(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate], where: str) -> Choice:
    """A provider for each group, all of a group from one, as Placement does it. Raises Refused NONE_FREE.

    Groups that few providers fit go first; of those that fit, the one is taken with the fewest free that has enough.
    """
    plan = groups.plan(wanted)
    chosen, without = _take(plan, _fitting(wanted, there), {one.provider: one.free for one in there})
    if without is not None:
        asked = ", ".join(f"{key}={value}" for key, value in sorted(wanted[without].items()))
        raise Refused(Reason.NONE_FREE, f"{where} has none free that is ready and fits {asked[:300]}.")
    shares: dict[str, tuple[str, int]] = {}
    for index, one in sorted(chosen.items()):
        before = shares.get(one.provider, ("", 0))[1]
        shares[one.provider] = one.resource_class, before + int(wanted[index][f"resources:{one.resource_class}"])
    types = frozenset(kind for one in chosen.values() for kind in one.types)
    return Choice(tuple(chosen[index].provider for index in plan), shares, types)


def room(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate], most: int) -> int:
    """How often what is wanted finds its place, one after the other as `choose` does it; counted up to `most`."""
    plan, fitting, left = groups.plan(wanted), _fitting(wanted, there), {one.provider: one.free for one in there}
    return next((n for n in range(most) if _take(plan, fitting, left)[1] is not None), most)


def _fitting(wanted: Sequence[Mapping[str, str]], there: Sequence[Candidate]) -> list[list[Candidate]]:
    return [[one for one in there if one.fits(group)] for group in wanted]


def _take(
    plan: Sequence[int], fitting: Sequence[Sequence[Candidate]], left: dict[str, int]
) -> tuple[dict[int, Candidate], int | None]:
    """By group the provider that serves it, of which less is `left` then; and the group for which there is none."""
    chosen: dict[int, Candidate] = {}
    for index in sorted(set(plan), key=lambda index: (len(fitting[index]), index)):
        count = plan.count(index)
        enough = [one for one in fitting[index] if left[one.provider] >= count]
        if not enough:
            return chosen, index
        chosen[index] = min(enough, key=lambda one: left[one.provider])
        left[chosen[index].provider] -= count
    return chosen, None
